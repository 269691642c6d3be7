"""Takes the README's pictures from a report, in a headless Chromium.

python -m data.make_pictures reports/report.html data/pictures
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def take_pictures(report, folder):
    """Writes decay.png, the language model's chart, and report.png, the head of the page. Args: paths."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1000, "height": 1000}, offline=True)
        page.goto(Path(report).resolve().as_uri())
        page.wait_for_function("[...document.querySelectorAll('.chart')].every((chart) => chart.view)")
        page.screenshot(path=Path(folder) / "report.png")
        page.locator(".chart").nth(1).screenshot(path=Path(folder) / "decay.png")
        browser.close()


if __name__ == "__main__":
    take_pictures(*sys.argv[1:])
