"""Importable stand-in for SGLang's CUDA kernels, for machines without CUDA.

SGLang imports `sgl_kernel` unconditionally, and the published build needs libcuda. On a CPU without AMX every layer
then takes SGLang's own torch path and calls none of these names, so each of them only has to exist: it raises when
called. Two groups must be real: ops looked up under `torch.ops.sgl_kernel` when models are imported, and the few places
where tensor parallelism assumes CUDA or AMX shared memory.

SGLang refuses `rl_on_policy_target` without an accelerator. With the environment variable VLMLAB_ON_POLICY_ON_CPU three
places, and nothing else, are replaced, so that what that argument does in plain torch can be seen: the list of
attention backends that may be deterministic gets "torch_native"; rotary frequencies, which it computes on the CPU, stay
there instead of `.cuda()`; `enable_batch_invariant_mode`, which registers Triton kernels for CUDA, does nothing, so
sums are torch's own. No arithmetic of SGLang's is replaced, and of what a GPU adds nothing is emulated.

Source: sglang@0.5.23: srt/models/qwen3_5.py (ops read at import), srt/distributed/parallel_state.py (pynccl, shm),
srt/arg_groups/overrides.py (_deterministic_attention_backend), srt/layers/rotary_embedding/base.py (_compute_inv_freq),
srt/batch_invariant_ops/batch_invariant_ops.py (enable_batch_invariant_mode).
"""

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import types

import torch

__version__ = "0.4.10"

OPS_READ_AT_IMPORT = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_gdn_gating_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
)

_library = torch.library.Library("sgl_kernel", "DEF")
for _op in OPS_READ_AT_IMPORT:
    _library.define(f"{_op}(Tensor x) -> Tensor")
# Called once per rank under tensor parallelism; the shared memory it would set up is switched off below.
_library.define("initialize(int size, int rank) -> ()")
_library.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")


def _absent(name):
    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel; this machine has only vlmlab's CPU stand-in")

    absent.__name__ = name
    return absent


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent(name)


class _EmptySubmodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`sgl_kernel.mamba` exists and, like the package, has every name."""

    def find_spec(self, fullname, path, target=None):
        if fullname == "sgl_kernel.mamba":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = __getattr__
        return module

    def exec_module(self, module):
        pass


def _gloo_only(parallel_state):
    """Tensor parallelism on CPU: no pynccl, no AMX shared-memory all-reduce, so gloo does the work."""
    original = parallel_state.GroupCoordinator.__init__
    signature = inspect.signature(original)

    def init(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        bound.arguments["use_pynccl"] = False
        original(*bound.args, **bound.kwargs)

    parallel_state.GroupCoordinator.__init__ = init
    parallel_state.is_shm_available = lambda *args, **kwargs: False


def _torch_native_may_be_deterministic(choices):
    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")


def _frequencies_stay(base):
    """`_compute_inv_freq` makes them on the CPU and ends in `.cuda()`; here that is where they are."""
    original = base.RotaryEmbedding._compute_inv_freq

    def compute(self, *args):
        move, torch.Tensor.cuda = torch.Tensor.cuda, lambda tensor: tensor
        try:
            return original(self, *args)
        finally:
            torch.Tensor.cuda = move

    base.RotaryEmbedding._compute_inv_freq = compute


def _no_batch_invariant_kernels(ops):
    ops.enable_batch_invariant_mode = lambda *args, **kwargs: None


class _PatchWhenImported(importlib.abc.MetaPathFinder):
    """Run `patch(module)` right after the module called `name` has been executed."""

    def __init__(self, name, patch):
        self.name, self.patch, self.searching = name, patch, False

    def find_spec(self, fullname, path, target=None):
        if fullname != self.name or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.searching = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.patch(module)

        spec.loader.exec_module = exec_module
        return spec


_PATCHES = {"sglang.srt.distributed.parallel_state": _gloo_only}
if os.environ.get("VLMLAB_ON_POLICY_ON_CPU"):
    _PATCHES |= {
        "sglang.srt.arg_groups.choices": _torch_native_may_be_deterministic,
        "sglang.srt.layers.rotary_embedding.base": _frequencies_stay,
        "sglang.srt.batch_invariant_ops.batch_invariant_ops": _no_batch_invariant_kernels,
    }

sys.meta_path.append(_EmptySubmodules())
for _name, _patch in _PATCHES.items():
    if _name in sys.modules:  # SGLang imports it before sgl_kernel
        _patch(sys.modules[_name])
    else:
        sys.meta_path.insert(0, _PatchWhenImported(_name, _patch))
