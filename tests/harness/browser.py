"""The browser of tests that open pages: Debian's Chromium, or Chrome."""

from __future__ import annotations

import shutil
from typing import Final

CHROMIUM: Final = shutil.which("chromium") or shutil.which("google-chrome")
