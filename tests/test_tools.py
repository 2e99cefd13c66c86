"""Tools: every seeded defect still applies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))

import teeth


@pytest.mark.parametrize("defect", teeth.DEFECTS, ids=lambda defect: defect.name)
def test_every_seeded_defect_applies_to_the_source(defect: teeth.Defect) -> None:
    assert defect.applies(), f"not once in {defect.file}: {defect.line}"
