"""The two engines of one checkpoint, each started when first needed and kept for what comes next.

Engines         a context that owns both
borrowed        engines that somebody else owns, or some of one's own

On a CPU SGLang starts while Transformers works, when told that it will be needed. On CUDA, and for large models, one is
closed before the other is opened, so that a model has to fit only once.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from vlmlab import store
from vlmlab.checkpoint import Checkpoint
from vlmlab.engine_hf import HFEngine, open_hf
from vlmlab.engine_sglang import SGLangEngine, open_sglang
from vlmlab.errors import VlmlabError
from vlmlab.machine import has_cuda

SMALL_BYTES = 2**30  # of weights, of which two engines fit beside each other
ENGINE_LOG = "sglang.log"  # of the last engine started; it names folders of this machine and does not travel


@contextlib.contextmanager
def borrowed(engines: "Engines | None", *about: Any) -> Iterator["Engines"]:
    """The engines given, left open, or some of their own for this block. Args: about: as of Engines."""
    with contextlib.nullcontext(engines) if engines is not None else Engines(*about) as opened:
        yield opened


class Engines:
    """Both engines of a checkpoint. A context: what it started is closed at its end.

    Args: checkpoint: what to load. attention: of Transformers. engine_args: further `sglang.Engine` arguments.
    deepstack_order: see engine_sglang.open_sglang.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        attention: str = "sdpa",
        engine_args: Mapping[str, Any] | None = None,
        deepstack_order: str = "sglang",
    ) -> None:
        self.checkpoint, self.attention = checkpoint, attention
        self.engine_args, self.deepstack_order = dict(engine_args or {}), deepstack_order
        self._hf, self._sglang = contextlib.ExitStack(), contextlib.ExitStack()
        self._loaded: HFEngine | None = None
        self._started: SGLangEngine | None = None

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._close_hf()
        self._close_sglang()

    @property
    def together(self) -> bool:
        """Whether both may be open at once."""
        return not has_cuda() and self.checkpoint.weight_bytes <= SMALL_BYTES

    def hf(self) -> HFEngine:
        """Transformers, loaded. Raises: VlmlabError: see open_hf."""
        if self._loaded is None:
            if not self.together:
                self._close_sglang()
            self._loaded = self._hf.enter_context(open_hf(self.checkpoint, attention=self.attention))
        return self._loaded

    def sglang(self) -> SGLangEngine:
        """SGLang, ready. Raises: VlmlabError: see open_sglang."""
        if not self.together:
            self._close_hf()
        engine = self._begin()
        engine.ready()
        return engine

    def sglang_soon(self) -> None:
        """SGLang will be needed: let it start while Transformers works, where both may be open. If it cannot, it says
        so when it is needed."""
        if self.together:
            with contextlib.suppress(VlmlabError):
                self._begin()

    def _begin(self) -> SGLangEngine:
        if self._started is None:
            folder = store.store_folder()
            self._started = self._sglang.enter_context(
                open_sglang(
                    self.checkpoint,
                    self.engine_args,
                    log=folder / ENGINE_LOG,
                    deepstack_order=self.deepstack_order,
                    wait=False,
                )
            )
        return self._started

    def _close_hf(self) -> None:
        self._loaded = None
        self._hf.close()

    def _close_sglang(self) -> None:
        self._started = None
        self._sglang.close()
