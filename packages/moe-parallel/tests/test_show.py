"""`python -m moe_parallel show`: a layout as text, or every reason why it is none."""

import random
import subprocess
import sys

import pytest

from moe_parallel import ParallelLayout, Topology
from moe_parallel.__main__ import main
from moe_parallel.show import describe, describe_rank
from moe_parallel.testing import legal_layouts

EXAMPLE = """\
64 ranks on 8 nodes

dense view: tp 2, cp 1, dp 8, pp 4 (fastest first)
  axis    size  groups  stride  nodes per group  first group
  tp         2      32       1                1  0, 1
  cp         1      64       2                1  0
  dp         8       8       2                2  0, 2, ..., 14
  pp         4      16      16                4  0, 16, 32, 48

expert view: etp 1, ep 8, edp 2, pp 4 (fastest first)
  axis    size  groups  stride  nodes per group  first group
  etp        1      64       1                1  0
  ep         8       8       1                1  0-7
  edp        2      32       8                2  0, 8
  pp         4      16      16                4  0, 16, 32, 48

placement of the ranks of pp 0 (0-15, and so on for 4 stages)
  dense: one row for each dp and cp, one column for each tp
    dp0 cp0    0    1
    dp1 cp0    2    3
    dp2 cp0    4    5
    dp3 cp0    6    7
    dp4 cp0    8    9
    dp5 cp0   10   11
    dp6 cp0   12   13
    dp7 cp0   14   15
  expert: one row for each edp, one column for each ep and etp
    edp0    0    1    2    3    4    5    6    7
    edp1    8    9   10   11   12   13   14   15
"""


def run(capsys, *arguments):
    status = main(["show", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_both_views_and_the_placement(capsys):
    assert run(capsys, "--world", "64", "--tp", "2", "--pp", "4", "--ep", "8") == (0, EXAMPLE, "")


def test_one_rank(capsys):
    status, out, err = run(capsys, "--world", "64", "--tp", "2", "--pp", "4", "--ep", "8", "--rank", "29")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "rank 29 on node 3",
        "  tp       1 of 2     28, 29",
        "  dp       6 of 8     17, 19, ..., 31",
        "  pp       1 of 4     13, 29, 45, 61",
        "  ep       5 of 8     24-31",
        "  edp      1 of 2     21, 29",
    ]


def test_a_bar_stands_between_nodes():
    text = describe(ParallelLayout(world=8, ep=8), Topology.regular(8, ranks_per_node=4))
    assert "    edp0   0   1   2   3 | 4   5   6   7" in text.splitlines()


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ("--world", "64", "--tp", "3", "--pp", "5", "--ep", "7", "--etp", "0"),
            [
                "parallel.etp = 0: a degree is an integer",
                "parallel.tp = 3: tp * cp * pp = ",
                "parallel.ep = 7: ep * pp",
            ],
        ),
        (("--world", "0"), ["world = 0: the number of ranks"]),
        (("--world", "64", "--ranks-per-node", "7"), ["ranks_per_node = 7 does not divide the world of 64 ranks"]),
        (("--world", "64", "--ranks-per-node", "0"), ["ranks_per_node = 0 does not divide"]),
        (("--world", "64", "--rank", "64"), ["rank 64 is outside the world; legal here: 0 to 63"]),
        (("--world", "64", "--rank", "-1"), ["rank -1 is outside the world"]),
    ],
)
def test_what_cannot_be_shown_is_said_at_once_with_status_2(capsys, arguments, lines):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    for said, expected in zip(err.splitlines(), lines, strict=True):
        assert said.startswith(expected)


def test_unknown_options_are_refused(capsys):
    for arguments in (["show", "--worl", "8"], ["show"], [], ["show", "--world", "8", "--ep", "two"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    capsys.readouterr()


def test_every_line_is_ascii_and_narrow():
    layouts = [
        ParallelLayout(world=16384, tp=16, cp=2, pp=4, ep=64),
        ParallelLayout(world=16384, ep=4096, etp=4),
        ParallelLayout(world=1),
        *random.sample(list(legal_layouts(96)), 20),
    ]
    for layout in layouts:
        topology = Topology.regular(layout.world, ranks_per_node=min(8, layout.world))
        texts = [describe(layout, topology), describe_rank(layout, topology, layout.world - 1)]
        for line in "\n".join(texts).splitlines():
            assert line.isascii()
            assert len(line) <= 120, line
            assert line == line.rstrip()


def python(*arguments):
    done = subprocess.run([sys.executable, *arguments], check=False, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_it_runs_without_torch():
    code = (
        "import sys\n"
        "from moe_parallel.__main__ import main\n"
        "status = main(['show', '--world', '64', '--tp', '2', '--pp', '4', '--ep', '8'])\n"
        "heavy = {'torch', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else status)"
    )
    assert python("-c", code) == (0, EXAMPLE, "")


def test_it_is_a_command():
    status, out, err = python("-m", "moe_parallel", "show", "--world", "6", "--ep", "4")
    assert (status, out) == (2, "")
    assert err.startswith("parallel.ep = 4: ")
