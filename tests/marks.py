"""Marks of tests that need something which not every machine has."""

from __future__ import annotations

import pytest

from whet.kernels.int8 import has_vnni

needs_vnni = pytest.mark.skipif(not has_vnni(), reason="no native operators, or no VNNI on this processor")
"""For tests of products in 8 bits, which whet refuses without these instructions."""
