"""vlmlab: two engines run the same vision-language model and disagree. Is it a bug or is it rounding, and where first?

Modules, lowest first; arrows point down only (a test reads the imports):

errors              VlmlabError, the one sentence a person gets instead of a traceback
machine             what this machine has: versions, devices, which engine can run and why not
store               what was captured or computed once, kept on disk for the next process
metrics             how different two tensors are
floats              floating-point formats, and rounding to them
kernels             SGLang's own CUDA kernels, where they can be imported
fp8                 FP8 weights and activations as SGLang quantizes them, and their product
fp8_weights         the linears of a checkpoint that compute in FP8, their weights quantised once
summation           the same numbers added in a chosen order
tree_boxes          an addition tree as few boxes, what repeats once
reveal              the order in which a given callable adds, by probing
arithmetic          each debatable step in each engine's way, as pure functions
reveal_ops          this machine's kernels as callables that sum
demos               a handful of numbers per cause, computed both ways
hookpoints          the canonical name of every captured tensor and where each engine produces it
checkpoint          a checkpoint folder, checked and hashed before any engine sees it
inputs              one prompt and picture as exact ids, pixels, grid and positions, with a content hash
grounding           pictures with one box to point at, answers read and judged
trace               {hook point: tensor} plus RunInfo: record while the engine runs, load lazily
page                HTML pages that travel: escaped, offline, without any path of this machine
causes              the catalogue of causes, and the plan that says which way every step goes
routing             which experts a router chooses, and where two traces choose others
hybrid              the one forward: every family, every debatable step as a plan says
replay              the forward on what an engine was given, whole or operation by operation; closure
passes              forward passes of one checkpoint, each computed once
engine_hf           Trace from Transformers, in process
sglang_worker       what runs inside SGLang's processes: the engine's owner and the recording hooks
engine_sglang       Trace from SGLang, whose engine lives in a child process
engines             the two engines of one checkpoint, each started once
hypotheses          what else could have moved an answer, each as one change of an input
on_policy           what rl_on_policy_target changes in SGLang, and what stands for each change alone
ask                 grounding cases asked of an engine, of the hybrid forward or of a server
batching            what asking several cases at once changes in their logits and answers
compare             two traces aligned: one row per hook point, one value per token
drift               two generated texts, step by step: distributions, states, growth, ways to compute
rollout             log-probabilities of tokens that one engine drew and another scores
sampling            settings that make two texts differ before any rounding does
capture             both engines on one input, stored on disk and reused
generation          both engines generate: freely, on the same tokens, in other shapes of work
verdict             bug or rounding: every operation against the envelope of legal plans
jitter              how far rounding can move an answered point
attribution         which cause explains the difference, which engine is closer to the truth
explorer            any plan on one input, as curves over depth
plots               numbers to figures
dashboard           toggles per cause and layer over explorer and plots
charts              numbers to charts that live in a page without a kernel
report              everything about one or several runs as one HTML file
notebooks           executed notebooks to HTML
cli                 the commands
"""

import os

__version__ = "0.1.0"

# Waiting OpenMP threads spin by default. With one other busy process on a small machine that made a 0.7 s forward take
# up to 16 s; a short spin took 0.9 s. Read once when torch loads; no bit depends on it.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
