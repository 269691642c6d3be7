import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from test_compare import NAMES, _trace
from test_trace import INFO

from vlmlab.compare import compare_traces
from vlmlab.errors import VlmlabError
from vlmlab.grounding import case_of, judge
from vlmlab.jitter import Reach
from vlmlab.plots import (
    plot_decay,
    plot_growth,
    plot_plan,
    plot_points,
    plot_reach,
    plot_shifts,
    plot_steps,
    plot_sums,
    plot_token_heat,
    plot_worst_tokens,
)
from vlmlab.trace import Trace

pytestmark = pytest.mark.engine


def _texts(figure):
    return " ".join(text.get_text() for axes in figure.axes for text in axes.texts)


@pytest.mark.parametrize("part", ["vision", "language"])
def test_decay_shows_the_rows_and_names_the_worst_token(comparison, part):
    figure = plot_decay(comparison, part)
    figure.canvas.draw()
    axes = figure.axes[0]
    assert axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "worst token",
        "mean over tokens",
        "whole tensor",
    ]
    stream = [r for r in comparison.part(part) if r.hookpoint.endswith("resid_post")]
    drawn = axes.lines[0].get_ydata()
    assert set(1 - r.cosine_min for r in stream) <= set(drawn)
    assert "token " in _texts(figure)


def test_identical_points_are_drawn_apart_and_counted(comparison):
    assert "1 of 31 points bit-equal" in _texts(plot_decay(comparison, "language"))


def test_all_identical_still_draws():
    comparison = compare_traces(_trace(), _trace())
    figure = plot_decay(comparison, "language")
    figure.canvas.draw()
    assert "2 of 2 points bit-equal" in _texts(figure)
    plot_token_heat(comparison, "vision").canvas.draw()


def test_the_worst_tokens_are_outlined_where_they_are(comparison, inputs):
    values = 1 - comparison.cosines["vision.merger"].numpy()
    figure = plot_worst_tokens(values, inputs.image, (24, 30), "1 - cosine", count=3)
    worst = comparison.row("vision.merger").cosine_min_token
    assert f"1: token {worst}" in _texts(figure)
    corner = figure.axes[0].patches[0].get_xy()
    assert corner == (worst % 30, worst // 30)


def test_tokens_without_a_difference_are_not_outlined(inputs):
    figure = plot_worst_tokens(np.zeros(720), inputs.image, (24, 30), "1 - cosine")
    assert not figure.axes[0].patches and figure.axes[0].get_title(loc="left") == "identical at every token"


def test_heat_shows_every_block_and_token(comparison):
    image = plot_token_heat(comparison, "language").axes[0].images[0]
    assert image.get_array().shape == (28, 830)


def test_nothing_compared_is_no_evidence(inputs):
    only_language = {name: tensor for name, tensor in _trace().tensors.items() if name in NAMES[3:]}
    comparison = compare_traces(Trace(INFO, only_language), Trace(INFO, only_language))
    for plot in (plot_decay, plot_token_heat):
        with pytest.raises(ValueError, match="no evidence"):
            plot(comparison, "vision")
    with pytest.raises(ValueError, match="expected a grid of 6 tokens"):
        plot_worst_tokens(np.zeros(6), inputs.image, (24, 30), "1 - cosine")


def test_a_plan_is_drawn_with_its_envelope_and_identical_points_hollow():
    rows = {"hookpoint": ["vision.0.resid_pre", "vision.merger"], "worst": [0.0, 2e-3], "mean": [0.0, 1e-3]}
    table = pd.DataFrame({**rows, "token": [0, 1], "envelope": [0.0, 4e-3]})
    axes = plot_plan(table, "relative L2 error", "a title").axes[0]
    assert axes.get_title(loc="left") == "a title" and axes.get_yscale() == "log"
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert [list(line.get_xdata()) for line in hollow] == [[0], [0]]


def test_figures_do_not_pile_up(comparison):
    before = plt.get_fignums()
    plot_decay(comparison, "vision")
    assert plt.get_fignums() == before


def test_steps_are_drawn_with_zeros_hollow_and_gaps_left():
    axes = plot_steps({"a": [1.0, 0.0, float("nan"), 2.0], "b": [0.0] * 4}, "distance", "title", mark=2).axes[0]
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["a", "b", "the texts part"]
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert [list(line.get_xdata()) for line in hollow] == [[1], [0, 1, 2, 3]]
    with pytest.raises(VlmlabError, match="no evidence"):
        plot_steps({"a": [float("nan")]}, "distance", "title")


def test_sums_and_growth_are_drawn():
    axes = plot_sums([1.0, 1.0, 1.5, 2.0], 1.25, 0.5, "title").axes[0]
    assert [bar.get_height() for bar in axes.patches] == [2, 1, 1] and axes.get_title() == "title"
    errors = pd.DataFrame({"sequential": [1e-3, 4e-3], "pairwise": [1e-3, 2e-3]}, index=[4, 64])
    lines = plot_growth(errors, 2.0**-9, "title").axes[0].get_lines()
    assert [line.get_label() for line in lines] == [
        "sequential",
        "pairwise",
        "worst-case bound: n u",
        "random errors: sqrt(n) u",
    ]
    assert list(lines[2].get_ydata()) == [4 * 2.0**-9, 64 * 2.0**-9]
    assert list(lines[3].get_ydata()) == [2 * 2.0**-9, 8 * 2.0**-9]
    assert list(lines[0].get_ydata()) == [1e-3, 4e-3]


def test_many_ulps_get_a_coarser_grid_that_says_so():
    axes = plot_sums([0.0, 1.0, 1000.0], 1.0, 1.0, "title").axes[0]
    assert axes.get_xlabel() == "sum; a grid line every 32 ulp"
    assert set(np.diff(axes.get_xticks(minor=True))) == {32.0}
    assert [bar.get_height() for bar in axes.patches] == [2, 1] and list(axes.lines[0].get_xdata()) == [1.0, 1.0]


def test_points_and_the_reach_are_drawn_where_they_are_and_lost_ones_are_named():
    case = case_of((200, 100), (20, 20, 60, 60), "red", "rectangle")
    answers = {"first": "(200, 400)", "order": "(205, 400)", "lost": "nowhere"}
    outcomes = {name: judge(case, answer, "qwen3_vl") for name, answer in answers.items()}
    figure = plot_points(case, outcomes)
    figure.canvas.draw()
    (axes,) = figure.axes
    drawn = [np.asarray(points.get_offsets()).tolist() for points in axes.collections]
    assert drawn == [[[40.0, 40.0]], [[41.0, 40.0]], []]
    names = [label.get_text() for label in axes.get_legend().get_texts()]
    assert names == ["target", "first", "order", "lost: unparsable"]
    reach = Reach(outcomes["first"], tuple(outcomes.values())[:2], (40.0, 40.0, 41.0, 40.0), True)
    figure = plot_reach(case, reach, outcomes)
    figure.canvas.draw()
    whole, close = figure.axes
    assert whole.get_xlim() == (0, 200) and close.get_xlim() == (38.5, 42.5)
    assert [patch.get_bbox().bounds for patch in whole.patches] == [(20, 20, 40, 40), (40, 40, 1, 0)]
    plot_reach(case, Reach(outcomes["lost"], (outcomes["lost"],), None, True), outcomes).canvas.draw()


def test_shifts_show_every_case_and_the_reported_one():
    figure = plot_shifts({"order": [0.0, 1.0, 3.0], "dropped": [700.0], "unreadable": []}, 285, "three ways")
    figure.canvas.draw()
    (axes,) = figure.axes
    assert [len(points.get_offsets()) for points in axes.collections] == [3, 1, 0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["order", "dropped", "unreadable"]
    assert axes.get_legend().get_texts()[0].get_text() == "reported: 285"
