"""Steps of T-GCN are measured both ways, with equal results."""

import pytest

from benchmarks.dynamic.gated import measure_gated_steps


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "way"), [(16, "one kernel"), (33, "kernels between products")])
def test_both_ways_are_measured_beside_a_limit(channels, way):
    rows = {(row.case, row.metric): row for row in measure_gated_steps(10_000, "tiny", channels)}

    for what in ("forward", "with gradients"):
        case = f"gated/tiny/{channels} channels/{what}"
        kernels = rows[case, way]
        assert 0 < kernels.limit < kernels.p50
        ratio = rows[case, "torch's functions over ours"].p50
        assert ratio == pytest.approx(rows[case, "torch's functions"].p50 / kernels.p50, rel=0.5)


def test_a_cpu_has_one_way():
    rows = list(measure_gated_steps(50, "tiny", 4, device="cpu"))

    assert [row.metric for row in rows] == ["torch's functions"] * 2
    assert all(row.limit is None and row.p50 > 0 for row in rows)
