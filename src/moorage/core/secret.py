"""Where the secret of an attempt travels: in an environment variable, and in no file (R34)."""

from __future__ import annotations

TOKEN_VARIABLE = "MOORAGE_TOKEN"
