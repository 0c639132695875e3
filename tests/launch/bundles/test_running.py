"""The finder of a bundle, in this process; programs that run with one are in `test_making.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from megatron.launch.bundles.making import ensure_bundle
from megatron.launch.bundles.running import BundleFinder, BundleLoader


def test_a_found_module_is_where_its_source_is(tmp_path: Path) -> None:
    ensure_bundle(tmp_path / "bundle", sys.executable, ("json.decoder",))
    finder = BundleFinder(str(tmp_path / "bundle"))
    package, module = finder.find_spec("json"), finder.find_spec("json.decoder")
    assert finder.find_spec("no_such_module") is None and finder.find_spec("sys") is None
    assert package is not None and module is not None and isinstance(module.loader, BundleLoader)
    assert package.submodule_search_locations == [str(Path(str(package.origin)).parent)]
    assert module.submodule_search_locations is None
    loaded = importlib.util.module_from_spec(module)
    module.loader.exec_module(loaded)
    assert loaded.JSONDecoder().decode("[1]") == [1] and loaded.__file__ == sys.modules["json.decoder"].__file__
