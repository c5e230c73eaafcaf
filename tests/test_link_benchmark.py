"""The benchmark on links of a rate: its table hides no loss, and links have their rate."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import link
import peer_link
import peers
from peer_link import LinkComparison
from peer_steps import Comparison, Timing

ROOT = Path(__file__).parents[1]


def compared(
    limited: float, free: float, peer: tuple[float, float] = (0.2, 0.1), error: str = "", planned: float = 0.05
) -> LinkComparison:
    def on_links(ours: float, theirs: float) -> Comparison:
        peers = {"DDP": Timing.failed(error) if error else Timing(0.1, theirs, (1.0,))}
        return Comparison("dp", 128, 16, 4, Timing(0.1, ours, (1.0,)), peers, {"all_reduce": 2}, 2e6)

    return LinkComparison(1e9, on_links(limited, peer[0]), on_links(free, peer[1]), Timing(0.1, 0.3, ()), planned)


@pytest.mark.parametrize(("text", "bits"), [("1Gbit", 1e9), ("250Mbit", 2.5e8), ("56kbit", 5.6e4), ("2.5Gbit", 2.5e9)])
def test_rates_are_those_of_tc(text, bits):
    assert bits == link.bits_per_second(text)


@pytest.mark.parametrize("text", ["1", "1Gb", "fast", "-1Gbit", "1 Gbit"])
def test_other_rates_are_refused(text):
    with pytest.raises(ValueError, match=r"A rate must be a number and kbit, Mbit or Gbit, such as 1Gbit \(got '"):
        link.bits_per_second(text)


def test_what_is_exposed_is_what_the_link_adds():
    (row,) = peer_link.rows([compared(0.1, 0.09)])
    expected = ("100.0", "200.0", "0.50", "300.0", "90.0", "100.0", "10%", "5%", "50%", "2.00", "16.0", "")
    assert ("dp", "128", "16", "DDP", *expected) == row


def test_rows_say_what_is_lost_and_what_fails():
    found = [compared(0.1, 0.08), compared(0.3, 0.3), compared(0.3, 0.1), compared(0.1, 0.1, error="RuntimeError: no")]
    verdicts = ["exposes more than 15%", "loses wall", "loses wall, exposes more than 15%", "RuntimeError: no"]
    assert verdicts == [row[-1] for row in peer_link.rows(found)]
    (planned,) = peer_link.rows([compared(0.1, 0.08, planned=0.18)])
    assert planned[-1] == "exposes more than 15%, as planned"


def test_markdown_marks_what_is_lost():
    *_, row = peers.markdown([compared(0.3, 0.1)], "about").splitlines()
    assert "| **1.50** |" in row and "| **67%** |" in row


def namespaces() -> bool:
    try:
        link.check()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_links_have_their_rate(tmp_path):
    if not namespaces():
        pytest.skip("this machine does not allow a user to make namespaces")
    command = "benchmarks/peers.py --link 20Mbit --strategies dp --sizes 64x4 --rounds 2 --ranks 2 --json"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    subprocess.run(
        [sys.executable, *command.split(), str(tmp_path / "found.json")], cwd=ROOT, env=environment, check=True
    )
    (found,) = json.loads((tmp_path / "found.json").read_text())["found"]
    (peer,) = found["limited"]["peers"].values()
    (free,) = found["free"]["peers"].values()
    parameters = 4 * (12 * 64 * 64 + 13 * 64) + (2 * 256 + 64) * 64  # of four layers, and of both embeddings
    seconds = 4 * parameters * 8 / 20e6  # two ranks send the gradients once
    assert 0.8 * seconds < peer["wall"] - free["wall"] < 2 * seconds
    assert found["limited"]["spmd"]["losses"] == pytest.approx(peer["losses"], rel=1e-5)
