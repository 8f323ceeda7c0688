"""The functions of this folder are compared with TRL's own."""

import pytest

pytest.importorskip("trl", reason="the comparison needs the bench extra (trl)")
