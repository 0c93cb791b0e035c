"""What a compiled program says of its exchanges, and how the plan compares with the compiler."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")

from raygpt.engines.jax.compiled import Collective, collectives_in
from raygpt.errors import RaygptError
from raygpt.planning.compiler import ask_compiler
from raygpt.planning.forecast import forecast
from raygpt.planning.target import parse_target
from raygpt.recipes import load_recipe

MESH = {"data": 2, "fsdp": 2, "tensor": 2, "context": 1}
PROGRAM = """HloModule jit_step

%body (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %gather = bf16[8,128]{1,0} all-gather(%x), channel_id=1, replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}
  %sum = f32[8,128]{1,0} all-reduce(%y), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (q: f32[8,128]) -> f32[8,128] {
  %loop = (s32[], f32[8,128]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %begin = (f32[4,128], f32[8,128]) all-gather-start(%z), replica_groups=[2,4]<=[2,4], dimensions={0}
  %end = f32[8,128] all-gather-done(%begin)
  %both = (f32[2]{0}, f32[6]{0}) all-reduce(%u, %v), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
}
"""


def test_exchanges_are_counted_by_kind_and_axis_and_those_of_a_loop_as_often_as_it_runs():
    assert list(collectives_in(PROGRAM, MESH)) == [
        Collective("all-reduce", "tensor", 12, 12 * 8 * 128 * 4),
        Collective("all-gather", "fsdp", 12, 12 * 8 * 128 * 2),
        Collective("all-gather", "fsdp × tensor", 1, 8 * 128 * 4),
        Collective("all-reduce", "data", 1, (2 + 6) * 4),
    ]


TPU_PROGRAM = """HloModule jit_step

%body (p: (f32[8,128], u32[])) -> (f32[8,128], u32[]) {
  %two = u32[]{:T(128)} constant(2)
  %counter = u32[]{:T(128)} get-tuple-element(%p), index=1
  %send = (bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[8,128]{1,0}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=1, source_target_pairs={{0,2},{2,0}}
  %next = u32[]{:T(128)} add(%counter, %two), metadata={op_name="next"}
  ROOT %both = (f32[8,128]{1,0}, u32[]{:T(128)}) tuple(%y, %next)
}

%condition (p: (f32[8,128], u32[])) -> pred[] {
  %limit = u32[]{:T(128)} constant(8), metadata={op_name="limit"}
  %counter.1 = u32[]{:T(128)} get-tuple-element(%p), index=1
  ROOT %less = pred[]{:T(512)} compare(%counter.1, %limit), direction=LT
}

%async_collective_fusion.1 (p: f32[2,8]) -> f32[4,8] {
  ROOT %gather.1 = f32[4,8]{1,0} all-gather(%p), channel_id=2, replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={0}
}

%async_collective_fusion.2 (p: f32[2,8]) -> f32[4,8] {
  ROOT %gather.2 = f32[4,8]{1,0} all-gather(%p), channel_id=2, replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={0}
}

%all-reduce-scatter.1 (p: f32[8]) -> f32[2] {
  %sum = f32[8]{0} all-reduce(%p), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add
  ROOT %own = f32[2]{0} dynamic-slice(%sum, %i), dynamic_slice_sizes={2}
}

ENTRY %main (q: f32[8,128]) -> f32[8,128] {
  %loop = (f32[8,128]{1,0}, u32[]{:T(128)}) while(%t), condition=%condition, body=%body
  %begun = f32[4,8]{1,0} fusion(%a), kind=kCustom, calls=%async_collective_fusion.1
  %done = f32[8,128]{1,0} fusion(%a), kind=kCustom, calls=%async_collective_fusion.2
  %fsdp = f32[8,128]{1,0} all-gather(%a), replica_groups=mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1'}, dimensions={0}
  %outer = f32[2]{0} all-reduce(%b), replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0':(1)4,'axis_1'}, to_apply=%add
  %part = f32[2]{0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1
  %data = f32[2]{0} all-reduce(%b), replica_groups=mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'a'}, to_apply=%add
}
"""  # noqa: E501


def test_a_tpus_loops_are_counted_by_their_counters_and_its_groups_by_the_axes_of_their_mesh():
    assert list(collectives_in(TPU_PROGRAM, MESH)) == [
        Collective("collective-permute", "fsdp", 4, 4 * 8 * 128 * 2),  # a counter from 0 to 8 in steps of 2
        Collective("all-gather", "fsdp", 1, 8 * 128 * 4),
        Collective("all-gather", "data", 1, 4 * 8 * 4),  # one, in two parts
        Collective("all-reduce", "data × fsdp", 1, 8),
        Collective("all-reduce", "fsdp", 1, 8),  # devices 0 and 2, in an order that is turned
        Collective("reduce-scatter", "fsdp × tensor", 1, 8),
    ]


@pytest.mark.parametrize(
    ("on", "engine", "line"),
    [
        ("8xh100", "jax", "--compile: the compiler for 8xh100 needs that device"),
        ("h200", "torch", "--compile: PyTorch compiles while it runs; write engine=jax"),
    ],
)
def test_a_compiler_that_is_not_here_is_refused_in_one_line(on, engine, line, tmp_path):
    plan = forecast(load_recipe("gpt2-124m", {"engine": engine, "run.storage": str(tmp_path)}), parse_target(on))
    with pytest.raises(RaygptError, match=line):
        ask_compiler(plan)


@pytest.mark.extended  # compiles for a quarter of a minute
def test_a_cpus_plan_has_the_compilers_state_and_no_less_memory(tmp_path):
    words = ["plan", "gpt2-tiny", "--compile", "--json", f"run.storage={tmp_path}", "training.steps=10"]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "raygpt", *words, "schedule.warmup_steps=0"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    compared = json.loads(done.stdout)["compiled"]["compared"]
    assert compared["state"]["plan"] == pytest.approx(compared["state"]["compiler"], rel=0.02)
    assert compared["memory in all"]["plan"] >= compared["memory in all"]["compiler"]
