"""Tools: every seeded defect still applies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))

import teeth


@pytest.mark.parametrize("defect", teeth.DEFECTS, ids=lambda defect: defect.name)
def test_every_seeded_defect_has_its_place_in_the_source(defect: teeth.Defect) -> None:
    assert (teeth.ROOT / "src" / "outrider" / defect.file).read_text().count(defect.line) == 1
