"""Compiled kernels, and how they are kept on the disk."""

import pytest
import torch

from nanoengine_cpu import compiling


def compile_double():
    """Compiles a small kernel; returns what it makes of an array."""
    def double(numbers):
        for i in range(len(numbers)):
            numbers[i] *= 2

    compiled = compiling.compile_kernel(double, "(float32[::1],)")
    numbers = torch.ones(3).numpy()
    compiled(numbers)
    return numbers.tolist()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling.numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.filterwarnings("ignore::numba.NumbaPerformanceWarning")
def test_a_first_compilation_says_that_it_compiles(cache, caplog):
    with caplog.at_level("INFO", logger="nanoengine_cpu"):
        for expected in (["compiling the kernels, which t"], []):
            compiling.say_once.cache_clear()
            caplog.clear()
            compile_double()
            assert [message[:30] for message in caplog.messages] == expected


@pytest.mark.filterwarnings("ignore::numba.NumbaPerformanceWarning")
@pytest.mark.parametrize("damage", ["", "index", "data", "empty index", "empty data", "full disk",
                                    "no folder"])
def test_a_cache_that_cannot_be_used_is_named_in_a_warning(cache, monkeypatch, caplog, damage):
    compiling.warn_once.cache_clear()
    if damage == "full disk":
        def fail(*arguments):
            raise OSError(28, "No space left on device")
        monkeypatch.setattr(compiling.numba.core.caching.IndexDataCacheFile, "save", fail)
    elif damage == "no folder":
        for name in ("UserProvidedCacheLocator", "InTreeCacheLocator", "UserWideCacheLocator"):
            locator = getattr(compiling.numba.core.caching, name)
            monkeypatch.setattr(locator, "ensure_cache_path",
                                lambda self: (_ for _ in ()).throw(PermissionError("read-only")))
    else:
        assert compile_double() == [2, 2, 2]
        for file in cache.rglob("*.nbi" if "index" in damage else "*.nbc") if damage else ():
            file.write_bytes(b"" if "empty" in damage else file.read_bytes()[:-200])
    assert compile_double() == [2, 2, 2]
    messages = [message for message in caplog.messages if "numba cannot use" in message]
    assert len(messages) == bool(damage)
    folder = "__pycache__" if damage == "no folder" else str(cache)
    assert all(folder in message and "compiled anew" in message for message in messages)
