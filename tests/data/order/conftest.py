"""Both builders of the order of samples."""

import pytest

from megatron.data.order import blend, index_map


@pytest.fixture(params=["compiled", "numpy"])
def builder(request, monkeypatch):
    """Runs a test with the compiled builder (skipping where it was not built) and without."""
    if request.param == "numpy":
        for module in (index_map, blend):
            monkeypatch.setattr(module, "compiled_builder", lambda: None)
    elif index_map.compiled_builder() is None:
        pytest.skip("the compiled index builder is not built here")
    return request.param
