"""Executed notebooks to HTML files that load nothing from a network.

run_notebook        execute one notebook with parameters; an error in a cell is an error here
write_html          an executed notebook as one HTML file
show_answer         a notebook's computed answer, as its first output
"""

import re
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from vlmlab.errors import VlmlabError
from vlmlab.trace import disk_errors


def run_notebook(notebook: Path, parameters: Mapping[str, Any], timeout_s: int = 600) -> Any:
    """Execute a notebook from its own folder.

    Args: notebook: file. parameters: for its cell tagged `parameters`. timeout_s: for one cell.
    Returns: executed notebook node. Raises: VlmlabError: a cell failed; names the cell and the error.
    """
    import papermill

    try:
        return papermill.execute_notebook(
            str(notebook),
            None,
            parameters=dict(parameters),
            cwd=str(notebook.parent),
            progress_bar=False,
            kernel_name="python3",
            execution_timeout=timeout_s,
            extra_arguments=["--Application.log_level=50"],
        )
    except papermill.PapermillExecutionError as error:
        raise VlmlabError(f"{notebook.name}: cell {error.cell_index} failed: {error.ename}: {error.evalue}") from error
    except TimeoutError as error:
        raise VlmlabError(f"{notebook.name}: a cell took longer than {timeout_s} s") from error


def write_html(executed: Any, file: Path, private: Mapping[str, str] | None = None) -> Path:
    """Write an executed notebook as one HTML file without any address to load from and any path of this machine.

    Args: executed: notebook node. file: HTML file to write. private: texts of this machine and what replaces them.
    Returns: file. Raises: VlmlabError: disk full, the page would load something, or it names this machine's folders.
    """
    from nbconvert import HTMLExporter

    # Maths and widgets would come from a content network; no notebook here needs either.
    exporter = HTMLExporter(template_name="lab", embed_images=True)
    exporter.mathjax_url = exporter.require_js_url = exporter.jquery_url = exporter.mermaid_js_url = ""
    exporter.widget_renderer_url = ""
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    page, _ = exporter.from_notebook_node(executed, resources={"metadata": {"name": file.stem.replace("_", " ")}})
    page = re.sub(r"<script[^>]*>(?:(?!</script>).)*?</script>", "", page, flags=re.DOTALL)
    for text, public in (private or {}).items():
        page = page.replace(text, public)
    loaded = addresses(page)
    if loaded:
        raise VlmlabError(f"{file.name} would load {loaded[0]} from a network; reports must open offline")
    leaked = [where for where in (str(Path.home()), str(Path.cwd()), sys.prefix) if len(where) > 1 and where in page]
    if leaked:
        raise VlmlabError(f"{file.name} would name a folder of this machine; reports travel. Nothing was written")
    partial = file.with_name(f".{file.name}.partial")
    with disk_errors():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(page, encoding="utf-8")
        partial.replace(file)
    return file


def addresses(page: str) -> list[str]:
    """Addresses a browser would load while showing a page: sources, style sheets and CSS urls, not links to click.

    Args: page: HTML. Returns: addresses in order.
    """
    patterns = (
        r"<(?:script|img|iframe|audio|video|source|embed)[^>]*\ssrc\s*=\s*[\"']?\s*((?:https?:)?//[^\"'\s>]+)",
        r"<link[^>]*\shref\s*=\s*[\"']?\s*((?:https?:)?//[^\"'\s>]+)",
        r"url\(\s*[\"']?((?:https?:)?//[^\"')\s]+)",
        r"@import\s+[\"']((?:https?:)?//[^\"']+)",
        r"\bimport\s*\(?\s*[\"']((?:https?:)?//[^\"']+)",
    )
    return [match for pattern in patterns for match in re.findall(pattern, page, flags=re.IGNORECASE)]


def show_answer(answer: str, overturned_by: str) -> None:
    """Display a notebook's computed answer and what would overturn it.

    Args: answer: at most three sentences with one number. overturned_by: an observation that would prove it wrong.
    """
    from IPython.display import HTML, display

    card = "border-left: 4px solid #2471a3; padding: 0.4em 1em; margin: 0.5em 0"
    page = f"<p><b>Answer.</b> {escape(answer)}</p><p><b>Overturned by</b> {escape(overturned_by)}</p>"
    display(HTML(f'<div style="{card}">{page}</div>'))
