"""What the documents say about the code is what the code is."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readmes_file_tree_is_current():
    readme = (ROOT / "README.md").read_text()
    assert script("make_file_tree").updated(readme) == readme, "run scripts/make_file_tree.py"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_files_named_in_the_documents_exist(document):
    import re

    text = (ROOT / document).read_text()
    for name in re.findall(r"\]\(([^)#]+)\)", text) + re.findall(
        r"`((?:scripts|configs)/[\w/.]+)`", text
    ):
        if "://" not in name:
            assert (ROOT / name).exists(), f"{document} names {name}"
