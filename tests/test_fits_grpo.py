"""Every GRPO config fits the accelerators that it names."""

from __future__ import annotations

import fits
import pytest

from benchmarks import plans


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in plans.planned() if n.startswith("grpo")])
def test_it_fits_with_a_tenth_to_spare(name):
  fits.check(name)
