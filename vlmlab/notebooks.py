"""Executed notebooks to HTML files that load nothing from a network.

parameter_names     what a notebook can be given
export_notebook     execute one and write its page, or write the page of an earlier time when nothing has changed since
exporting           several beside each other
run_notebook        execute one notebook with parameters; an error in a cell is an error here
write_html          an executed notebook as one HTML file, its widgets as they stood at the end
show_answer         a notebook's computed answer, as its first output
"""

import contextlib
import copy
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil

from vlmlab import store
from vlmlab.checkpoint import DATA
from vlmlab.errors import VlmlabError
from vlmlab.machine import device_info, versions
from vlmlab.page import policy, text, write_page

WAITING = "OMP_WAIT_POLICY"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"


def parameter_names(notebook: Path) -> set[str]:
    """What a notebook can be given. Args: notebook: file. Returns: names in its cell tagged `parameters`."""
    import papermill

    return set(papermill.inspect_notebook(str(notebook)))


def export_notebook(
    notebook: Path, parameters: Mapping[str, Any], file: Path, private: Mapping[str, str], fresh: bool = False
) -> tuple[Path, float, str | None]:
    """Execute a notebook and write its page; the page says when and on what.

    Args: notebook, parameters: see run_notebook. file, private: see write_html. fresh: execute even when nothing that
    it reads has changed since it was last executed here: notebook, parameters, package, data, versions, device.
    Returns: file, seconds it took, and when the page was made if it is an earlier one, else None.
    Raises: VlmlabError: see run_notebook and write_html.
    """
    start, data = time.perf_counter(), hashlib.sha256()
    for path in sorted(path for path in DATA.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        data.update(path.relative_to(DATA).as_posix().encode() + path.read_bytes())
    device, modules = device_info(), tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.py")))
    about = {"notebook": notebook.read_text(encoding="utf-8"), "parameters": dict(parameters), "data": data.hexdigest()}
    key = store.key_of("page", about | {"versions": versions(), "device": device}, modules)
    kept = None if fresh else store.read_json(key)
    if kept is None:
        created = datetime.now(UTC).isoformat(timespec="seconds")
        executed = run_notebook(notebook, parameters)
        where = f"Executed {created} on {device['name']} ({device['capability']})."
        write_html(executed, file, private, where)
        store.write_json(key, {"created": created, "page": file.read_text(encoding="utf-8")})
        return file, time.perf_counter() - start, None
    write_page(kept["page"], file, private)
    return file, time.perf_counter() - start, str(kept["created"])


@contextlib.contextmanager
def exporting(notebooks: Path, count: int) -> Iterator[Callable[..., Future]]:
    """A block in which notebooks of one folder are executed beside each other; it gives what begins one.

    Executing takes one core for imports and drawing and all of them for arithmetic; how many run at once changes no
    bit. When the block fails, the kernels that it started are ended.

    Args: notebooks: their folder. count: at once. Yields: takes the arguments of export_notebook, returns a future.
    """
    waiting = os.environ.get(WAITING)

    def begin(*given: Any) -> Future:
        os.environ[WAITING] = "passive"  # threads that spin while they wait would take the other kernel's cores
        return pool.submit(_export, *given)

    with contextlib.chdir(notebooks), ThreadPoolExecutor(count) as pool:  # papermill would change it in every thread
        try:
            yield begin
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in psutil.Process().children():
                if any("ipykernel" in part for part in child.cmdline()):
                    child.kill()
            raise
        finally:
            pool.shutdown()
            os.environ.pop(WAITING, None)
            if waiting is not None:
                os.environ[WAITING] = waiting


def _export(*given: Any) -> tuple[Path, float, str | None]:
    """In a thread of its own, whose event loop nobody else would close."""
    from jupyter_core.utils import ensure_event_loop

    loop = ensure_event_loop()
    try:
        return export_notebook(*given)
    finally:
        loop.close()


def run_notebook(notebook: Path, parameters: Mapping[str, Any], timeout_s: int = 1800) -> Any:
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


def write_html(executed: Any, file: Path, private: Mapping[str, str] | None = None, where: str = "") -> Path:
    """Write an executed notebook as one HTML file without scripts, addresses to load from and paths of this machine.

    Args: executed: notebook node. file: HTML file to write. private: texts of this machine and what replaces them.
    where: a sentence for its top.
    Returns: file. Raises: VlmlabError: disk full, the page would load something, or it names this machine's folders.
    """
    from nbconvert import HTMLExporter

    # Maths and widgets would come from a content network; no notebook here needs either.
    exporter = HTMLExporter(template_name="lab", embed_images=True)
    exporter.mathjax_url = exporter.require_js_url = exporter.jquery_url = exporter.mermaid_js_url = ""
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    resources = {"metadata": {"name": file.stem.replace("_", " ")}}
    page, _ = exporter.from_notebook_node(_without_widgets(executed), resources=resources)
    page = re.sub(r"<script\b.*?</script\s*>", "", page, flags=re.DOTALL | re.IGNORECASE)
    head, tag, rest = page.partition("<head>")
    if not tag:
        raise VlmlabError(f"{file.name}: nbconvert's page has no head for the tag that forbids every load")
    before, body, after = rest.partition("<main>")
    if where and not body:
        raise VlmlabError(f"{file.name}: nbconvert's page has no main part for the sentence at its top")
    note = f"<p><small>{text(where)}</small></p>" if where else ""
    return write_page(f"{head}{tag}{policy()}{before}{body}{note}{after}", file, private)


def _without_widgets(executed: Any) -> Any:
    """A copy of a notebook with every widget output as HTML that needs no kernel."""
    notebook = copy.deepcopy(executed)
    models = notebook.metadata.pop("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            view = output.get("data", {}).pop(WIDGET_VIEW, None)
            if view is not None:
                note = "State when the notebook was executed; the live controls need JupyterLab."
                output["data"]["text/html"] = f"<p><small>{note}</small></p>{_still(view['model_id'], models)}"
    return notebook


def _still(model_id: str, models: Mapping[str, Any]) -> str:
    """A widget and all inside it as HTML, never nothing."""
    if model_id not in models:
        return "<p>The state of this widget was not stored; execute the notebook in JupyterLab to see it.</p>"
    name, state = text(models[model_id]["model_name"].removesuffix("Model")), models[model_id]["state"]
    if "children" in state:
        return _box(name, state, models)
    picture = next((b["data"] for b in models[model_id].get("buffers", []) if list(b["path"]) == ["value"]), "")
    if name == "Image" and state["format"] != "url" and picture:
        source = escape(f"data:image/{state['format']};base64,{picture}")
        caption = f"<figcaption>{text(state['tooltip'])}</figcaption>" if state.get("tooltip") else ""
        return f'<figure style="margin:0"><img alt="picture" src="{source}" style="max-width:100%">{caption}</figure>'
    description = text(state.get("description") or "")
    if name in ("HTML", "HTMLMath", "Label") and state["value"]:
        value = text(state["value"]) if name == "Label" else state["value"]
        return f"<div>{description}{': ' if description else ''}{value}</div>"
    if "value" not in state and "_options_labels" not in state:
        label = f"{description} ({name})" if description else name
        return f"<div>{label}: nothing to show outside JupyterLab</div>"
    shown = f"{description or name}: {_value(name, state)}"
    if name == "ToggleButton":
        weight = "bold" if state["value"] else "normal"
        shape = f"border:1px solid;border-radius:3px;padding:0 .5em;white-space:nowrap;font-weight:{weight}"
        return f'<span style="{shape}">{shown}</span>'
    return f"<div>{shown}</div>"


def _box(name: str, state: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    flow = "row wrap" if name == "HBox" else "column"
    titles = [f"<b>{text(title)}</b>" for title in state.get("titles", ())]
    children = (_still(child.removeprefix("IPY_MODEL_"), models) for child in state["children"])
    inner = "".join(title + child for title, child in zip_longest(titles, children, fillvalue=""))
    return f'<div style="display:flex;flex-flow:{flow};gap:.4em">{inner or f"{name}: empty"}</div>'


def _value(name: str, state: Mapping[str, Any]) -> str:
    """What a control is set to, in words."""
    if name == "Password":
        return "hidden"
    labels = state.get("_options_labels")
    value = state.get("value" if labels is None else "index")
    values = list(value) if isinstance(value, (list, tuple)) else [] if value in (None, "") else [value]
    if labels is not None:
        values = [labels[index] for index in values]
    words = ["on" if value is True else "off" if value is False else str(value) for value in values]
    return text((" to " if "Range" in name else ", ").join(words)) or "empty"


def show_answer(answer: str, overturned_by: str) -> None:
    """Display a notebook's computed answer and what would overturn it.

    Args: answer: at most three sentences with one number. overturned_by: an observation that would prove it wrong.
    """
    from IPython.display import HTML, display

    card = "border-left: 4px solid #2471a3; padding: 0.4em 1em; margin: 0.5em 0"
    page = f"<p><b>Answer.</b> {text(answer)}</p><p><b>Overturned by</b> {text(overturned_by)}</p>"
    display(HTML(f'<div style="{card}">{page}</div>'))
