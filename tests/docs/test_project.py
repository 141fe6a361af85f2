"""Files for GitHub and package indexes: equal versions and addresses, valid by their schemas."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import aiokv

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_all_places_have_the_same_version():
    (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert PROJECT["version"] == aiokv.__version__ == CITATION["version"] == newest


def test_all_places_name_the_same_repository():
    repository = PROJECT["urls"]["Repository"]
    addresses = [*PROJECT["urls"].values(), CITATION["repository-code"]]
    assert [address for address in addresses if not address.startswith(repository)] == []
    assert PROJECT["license"] == CITATION["license"]


def test_each_address_in_the_repository_is_a_file():
    main = f"{PROJECT['urls']['Repository']}/blob/main/"
    named = [a.removeprefix(main) for a in PROJECT["urls"].values() if a.startswith(main)]
    assert len(named) == 2
    assert [name for name in named if not (ROOT / name).exists()] == []
