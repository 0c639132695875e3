"""Malicious pickles, each with a pattern of the expected refusal.

`CALLS` execute something when Python unpickles them; they leave the file "canary" if they succeed. The others are
damaged or too large, or misuse what the reader admits.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable
from typing import Any

CANARY = "canary"
_PYTHON = f"open({CANARY!r}, 'w').close()"
_SHELL = f"touch {CANARY}"


def text(value: str) -> bytes:
    """The operation that pushes a text."""
    content = value.encode()
    return b"X" + struct.pack("<I", len(content)) + content


def name(module: str, last: str) -> bytes:
    """The operation that pushes what a name means."""
    return b"c" + module.encode() + b"\n" + last.encode() + b"\n"


def value(plain: Any) -> bytes:
    """The operations that push a plain value."""
    return pickle.dumps(plain, 2)[2:-1]


def call(module: str, last: str, *arguments: bytes) -> bytes:
    """The operations that call a name; arguments are operations, too."""
    return name(module, last) + b"(" + b"".join(arguments) + b"tR"


def whole(*operations: bytes) -> bytes:
    """A complete pickle of protocol 2."""
    return b"\x80\x02" + b"".join(operations) + b"."


def _system() -> bytes:
    return call("builtins", "getattr", call("builtins", "__import__", text("os")), text("system"))


# name -> (pickle, what the refusal names)
CALLS: dict[str, tuple[bytes, str]] = {
    "os_system": (whole(call("os", "system", text(_SHELL))), "os.system"),
    "posix_system": (whole(call("posix", "system", text(_SHELL))), "posix.system"),
    "popen": (whole(call("os", "popen", text(_SHELL))), "os.popen"),
    "subprocess_call": (whole(call("subprocess", "call", value(["touch", CANARY]))), "subprocess.call"),
    "subprocess_popen": (whole(call("subprocess", "Popen", value(["touch", CANARY]))), "subprocess.Popen"),
    "subprocess_output": (whole(call("subprocess", "getoutput", text(_SHELL))), "subprocess.getoutput"),
    "spawn": (whole(call("os", "spawnlp", value(0), text("touch"), text("touch"), text(CANARY))), "os.spawnlp"),
    "eval": (whole(call("builtins", "eval", text(_PYTHON))), "builtins.eval"),
    "exec": (whole(call("builtins", "exec", text(_PYTHON))), "builtins.exec"),
    "old_eval": (whole(call("__builtin__", "eval", text(_PYTHON))), "builtins.eval"),
    "compile": (
        whole(call("builtins", "exec", call("builtins", "compile", text(_PYTHON), text("x"), text("exec")))),
        "builtins.exec",
    ),
    "getattr_of_import": (whole(_system() + b"(" + text(_SHELL) + b"tR"), "builtins.__import__"),
    "import_module": (
        whole(
            call("builtins", "getattr", call("importlib", "import_module", text("os")), text("system"))
            + b"("
            + text(_SHELL)
            + b"tR"
        ),
        "importlib.import_module",
    ),
    "partial": (whole(call("functools", "partial", name("os", "system"), text(_SHELL)) + b")R"), "functools.partial"),
    "map": (
        whole(call("builtins", "list", call("builtins", "map", name("os", "system"), value([_SHELL])))),
        "builtins.map",
    ),
    "methodcaller": (
        whole(
            call("operator", "methodcaller", text("system"), text(_SHELL))
            + b"("
            + call("builtins", "__import__", text("os"))
            + b"tR"
        ),
        "operator.methodcaller",
    ),
    "attrgetter": (
        whole(
            call("operator", "attrgetter", text("system"))
            + b"("
            + call("builtins", "__import__", text("os"))
            + b"tR("
            + text(_SHELL)
            + b"tR"
        ),
        "operator.attrgetter",
    ),
    "reduce": (
        whole(
            call("functools", "reduce", name("builtins", "pow"), value([2, 3])),
            b"0",
            call("os", "system", text(_SHELL)),
        ),
        "functools.reduce",
    ),
    "interpreter": (
        whole(
            call("builtins", "getattr", call("code", "InteractiveInterpreter"), text("runsource"))
            + b"("
            + text(_PYTHON)
            + b"tR"
        ),
        "code.InteractiveInterpreter",
    ),
    "timeit": (
        whole(call("timeit", "timeit", text("0"), text(_PYTHON), name("time", "time"), value(1))),
        "timeit.timeit",
    ),
    "profile": (whole(call("cProfile", "run", text(_PYTHON), text("profile"))), "cProfile.run"),
    "breakpoint_run": (
        whole(call("bdb", "Bdb") + b"0" + call("trace", "Trace") + b"0" + call("builtins", "exec", text(_PYTHON))),
        "bdb.Bdb",
    ),
    "open": (whole(call("builtins", "open", text(CANARY), text("w"))), "builtins.open"),
    "io_open": (whole(call("io", "open", text(CANARY), text("w"))), "io.open"),
    "file_io": (whole(call("_io", "FileIO", text(CANARY), text("w"))), "_io.FileIO"),
    "argparse_file": (
        whole(call("argparse", "FileType", text("w")) + b"(" + text(CANARY) + b"tR"),
        "argparse.FileType",
    ),
    "log_file": (whole(call("logging", "FileHandler", text(CANARY))), "logging.FileHandler"),
    "zip_file": (whole(call("zipfile", "ZipFile", text(CANARY), text("w"))), "zipfile.ZipFile"),
    "database": (whole(call("sqlite3", "connect", text(CANARY))), "sqlite3.connect"),
    "copy": (whole(call("shutil", "copy", text("/dev/null"), text(CANARY))), "shutil.copy"),
    "make_directory": (whole(call("os", "mkdir", text(CANARY))), "os.mkdir"),
    "numpy_save": (
        whole(
            call("numpy", "save", text(CANARY), value([1])), b"0", call("numpy", "savetxt", text(CANARY), value([1]))
        ),
        "numpy.save",
    ),
    "numpy_memmap": (
        whole(call("numpy", "memmap", text(CANARY), text("uint8"), text("w+"), value(0), value((4,)))),
        "numpy.memmap",
    ),
    "torch_save": (whole(call("torch", "save", value([1]), text(CANARY))), "torch.save"),
    "collect_env": (whole(call("torch.utils.collect_env", "run", text(_SHELL))), "torch.utils.collect_env.run"),
    "nested_pickle": (whole(call("pickle", "loads", value(whole(call("os", "system", text(_SHELL)))))), "pickle.loads"),
    "nested_torch": (
        whole(call("_pickle", "loads", value(whole(call("os", "system", text(_SHELL)))))),
        "_pickle.loads",
    ),
    "stack_name": (b"\x80\x04" + text("os") + text("system") + b"\x93(" + text(_SHELL) + b"tR.", "os.system"),
    "instance": (b"\x80\x02(" + text(_SHELL) + b"ios\nsystem\n.", "os.system"),
    "marked_object": (whole(b"(" + name("subprocess", "Popen") + value(["touch", CANARY]) + b"o"), "subprocess.Popen"),
    "new_object": (
        whole(name("subprocess", "Popen") + b")\x81" + b"0" + call("os", "system", text(_SHELL))),
        "subprocess.Popen",
    ),
    "attribute_of_a_class": (
        b"\x80\x04"
        + text("argparse")
        + text("Namespace.__init__.__globals__.get")
        + b"\x93("
        + text("_sys")
        + b"tR0"
        + b"cos\nsystem\n("
        + text(_SHELL)
        + b"tR.",
        "Namespace.__init__",
    ),
    "builtins_of_a_class": (
        b"\x80\x04"
        + text("collections")
        + text("OrderedDict.__class__")
        + b"\x930"
        + call("os", "system", text(_SHELL))
        + b".",
        "OrderedDict.__class__",
    ),
    "after_good_values": (
        whole(
            b"]"
            + value({"a": 1})
            + b"a"
            + name("argparse", "Namespace")
            + b")\x81a"
            + call("os", "system", text(_SHELL))
            + b"a"
        ),
        "os.system",
    ),
}

_STORAGE = name("torch", "FloatStorage")


def storage(key: str = "0", numel: int = 4, kind: bytes = _STORAGE) -> bytes:
    """The operations that refer to a storage of an archive."""
    return b"(" + text("storage") + kind + text(key) + text("cpu") + value(numel) + b"tQ"


def tensor(offset: Any, shape: Any, strides: Any, made_of: bytes | None = None) -> bytes:
    """The operations that make a tensor of the archive's storage of 4 floats."""
    made_of = storage() if made_of is None else made_of
    rest = (value(offset), value(shape), value(strides), value(False), call("collections", "OrderedDict"))
    return call("torch._utils", "_rebuild_tensor_v2", made_of, *rest)


def _doubled(levels: int) -> bytes:
    """A tuple of two tuples of two tuples..., of which only one each is stored."""
    return b")" + b"".join(
        b"q" + bytes([level]) + b"0h" + bytes([level]) + b"h" + bytes([level]) + b"\x86" for level in range(levels)
    )


# Pickles inside an archive that holds storage "0" of 16 bytes: name -> (pickle, what the refusal says)
MISUSES: dict[str, tuple[bytes, str]] = {
    "view_beyond_the_storage": (whole(tensor(0, (5,), (1,))), "5 elements from element 0"),
    "view_that_starts_beyond": (whole(tensor(2**40, (1,), (1,))), "element 1099511627776"),
    "view_with_large_strides": (whole(tensor(0, (2, 2), (1000, 1))), "4 elements from element 0"),
    "view_with_negative_strides": (whole(tensor(3, (4,), (-1,))), "strides of a tensor has the entry -1"),
    "view_of_negative_size": (whole(tensor(0, (-1,), (1,))), "shape of a tensor has the entry -1"),
    "view_that_repeats": (whole(tensor(0, (10**9,), (0,))), "1000000000 elements"),
    "view_of_many_dimensions": (whole(tensor(0, (1,) * 100, (1,) * 100)), "not a short list"),
    "strides_of_another_length": (whole(tensor(0, (4,), (1, 1))), "1 dimensions and 2 strides"),
    "tensor_of_a_text": (whole(tensor(0, (4,), (1,), text("storage"))), "made of storage"),
    "tensor_without_arguments": (whole(call("torch._utils", "_rebuild_tensor_v2")), "with 0 arguments"),
    "subclass_by_another_call": (
        whole(
            call(
                "torch._tensor",
                "_rebuild_from_type_v2",
                name("pathlib", "Path"),
                name("torch", "Tensor"),
                value(("a",)),
                value({}),
            )
        ),
        "rebuilt by pathlib.Path",
    ),
    "parameter_of_a_number": (whole(call("torch._utils", "_rebuild_parameter", value(1), value(True))), "made of 1"),
    "storage_outside_of_the_archive": (
        whole(storage("../../etc/passwd")),
        "passwd, which the zip file does not contain",
    ),
    "storage_of_another_length": (whole(storage("0", 400)), "16 bytes, but the pickle expects 400 elements"),
    "storage_of_negative_length": (whole(storage("0", -4)), "-4 elements"),
    "storage_of_an_unknown_kind": (whole(storage("0", 4, name("torch", "float32"))), "no known kind|not a known kind"),
    "persistent_file": (whole(text("/etc/passwd") + b"Q"), "invalid persistent id /etc/passwd"),
    "persistent_line": (b"\x80\x02P/etc/passwd\n.", "invalid persistent id /etc/passwd"),
    "extension": (whole(b"\x82\x01"), "unregistered extension code"),
    "out_of_band_buffer": (b"\x80\x05\x97.", "out-of-band data"),
    "getattr_of_a_container": (whole(call("builtins", "getattr", name("builtins", "dict"), text("get"))), "getattr on"),
    "encoding_that_unpacks": (whole(call("_codecs", "encode", text("x" * 99), text("bz2"))), "encoding bz2"),
    "size_of_texts": (whole(call("torch", "Size", value(["a"]))), "entry a"),
    "dictionary_of_triples": (whole(call("collections", "OrderedDict", value([(1, 2, 3)]))), "in place of a pair"),
    "set_of_a_number": (whole(call("builtins", "set", value(5))), "made of 5"),
    "arguments_that_are_no_tuple": (whole(name("torch", "Size"), value([1]), b"R"), "must be a tuple"),
    "call_of_a_value": (whole(value([1]), b")R"), "not callable"),
    "keyword_arguments": (whole(name("argparse", "Namespace"), b")", value({"a": 1}), b"\x92"), "keyword arguments"),
    "state_of_a_class": (whole(name("argparse", "Namespace"), value({"__init__": 1}), b"b"), "a state"),
    "state_in_slots": (
        whole(name("argparse", "Namespace"), b")\x81", value((None, {"a": 1})), b"b"),
        "the state a value",
    ),
    "state_of_a_list": (whole(value([1]), value({"append": 1}), b"b"), "'list' object has no attribute"),
    "state_of_a_tensor": (whole(tensor(0, (4,), (1,)), value({"shape": (10**9,)}), b"b"), "a state"),
    "slots_of_a_tensor": (whole(tensor(0, (4,), (1,)), value((None, {"shape": (10**9,)})), b"b"), "a state"),
    "state_of_a_storage": (whole(storage(), value({"size_bytes": 2**40}), b"b"), "a state"),
    "state_of_a_function": (
        whole(name("torch._utils", "_rebuild_tensor_v2"), value((None, {"__new__": 1})), b"b"),
        "_rebuild_tensor_v2 a state",
    ),
    "state_of_a_dictionary": (whole(call("collections", "OrderedDict"), value((None, {"a": 1})), b"b"), "a state"),
    "state_of_a_numpy_type": (
        whole(call("numpy", "dtype", text("f8")), value((None, {"code": "f2"})), b"b"),
        "numpy type has the state",
    ),
    "items_of_a_tensor": (whole(tensor(0, (4,), (1,)), value(1), value(2), b"s"), "damaged .TypeError"),
    "values_appended_to_an_object": (whole(name("argparse", "Namespace"), b")\x81", value(2), b"a"), "damaged .Attr"),
    "call_of_an_object": (whole(name("argparse", "Namespace"), b")\x81", b")R"), "not callable"),
    "object_of_a_tensor": (whole(tensor(0, (4,), (1,)), b")\x81"), "damaged .UnpicklingError"),
    "numpy_objects": (whole(call("numpy", "dtype", text("O8"), value(0), value(1))), "numpy type O8"),
    "numpy_structure": (whole(call("numpy", "dtype", text("V16"))), "numpy type V16"),
    "numpy_subclass": (
        whole(call("numpy.core.multiarray", "_reconstruct", name("numpy", "dtype"), value((0,)))),
        "numpy.dtype",
    ),
    "numpy_size": (
        whole(
            call("numpy._core.multiarray", "_reconstruct", name("numpy", "ndarray"), value((0,)), value(b"b")),
            b"(" + value(1) + value((10**9,)) + call("numpy", "dtype", text("f8")) + value(False) + value(b"x") + b"tb",
        ),
        "1000000000 numpy numbers",
    ),
    "append_to_a_number": (whole(value(1), value(2), b"a"), "'int' object has no attribute"),
    "items_of_a_list": (whole(value([]), value(1), value(2), b"s"), "damaged .IndexError"),
    "members_of_a_list": (whole(value([]), b"(", value(1), b"\x90"), "'list' object has no attribute"),
    "name_of_numbers": (whole(value(1), value(2), b"\x93"), "requires str"),
    "empty_stack": (whole(b"0"), "stack underflow"),
    "no_mark": (whole(b"t"), "MARK"),
    "unknown_reference": (whole(b"h\x07"), "damaged"),
    "no_end": (b"\x80\x02]", "ends within"),
    "protocol_of_the_future": (b"\x80\x09.", "protocol: 9"),
    "text_of_4_exabytes": (b"\x80\x04\x8d" + b"\xff" * 7 + b"\x3f.", "ends within"),
    "integer_of_2_gigabytes": (b"\x80\x02\x8b\xff\xff\xff\x7f.", "ends within"),
    "integer_of_1000_bytes": (b"\x80\x02\x8b\xe8\x03\x00\x00" + b"\x01" * 1000 + b".", "integer of 7993 bits"),
    "number_of_5000_digits": (b"I" + b"9" * 5000 + b"\n.", "damaged .ValueError"),
    "number_of_90_digits": (b"L" + b"9" * 90 + b"L\n.", "integer of 299 bits"),
    "text_that_is_not_utf8": (b"\x80\x02X\x02\x00\x00\x00\xff\xfe.", "damaged .UnicodeDecodeError"),
    "deep_nesting": (whole(b"]" * 100_000, b"a" * 99_999), "nested more than"),
    "value_in_itself": (whole(b"]q\x00h\x00a"), "contains itself"),
    "tuples_that_double": (whole(_doubled(200)), "values in it"),
    "paths_that_double": (
        whole(
            text("a" * 64),
            *(
                b"q\x00" + call("pathlib", "PosixPath", b"h\x00", b"h\x00") + b"q\x01" + b"h\x01" + b"q\x00"
                for _ in range(60)
            ),
        ),
        "longer than",
    ),
    "sets_that_fill_the_memory": (
        whole(
            value(list(range(20_000))),
            b"q\x05",
            b"(",
            *(call("builtins", "frozenset", b"h\x05") for _ in range(20_000)),
            b"l",
        ),
        "bytes of memory|takes more than",
    ),
}


# Pickles that end the process that reads them
ENDLESS: dict[str, bytes] = {
    "keys_that_take_for_ever_to_hash": whole(b"}", _doubled(90), value(1), b"s"),
    "keys_that_are_nested_too_deeply_to_hash": whole(b"})", b"\x85" * 2_000_000, value(1), b"s"),
}


def archive(
    pickled: bytes,
    storages: Iterable[tuple[str, bytes]] = (("0", b"\0" * 16),),
    *,
    compression: int = zipfile.ZIP_STORED,
    others: Iterable[tuple[str, bytes]] = (),
) -> bytes:
    """A zip file as torch.save writes it."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as written:
        written.writestr("archive/data.pkl", pickled)
        written.writestr("archive/byteorder", b"little")
        for key, content in storages:
            written.writestr(f"archive/data/{key}", content)
        for entry, content in others:
            written.writestr(entry, content)
    return target.getvalue()


def _renamed(content: bytes, old: bytes, new: bytes, last: bool = False) -> bytes:
    place = content.rindex(old) if last else content.index(old)
    return content[:place] + new + content[place + len(old) :]


_GOOD = whole(tensor(0, (4,), (1,)))


def _with_directory(change: Callable[[bytes], bytes]) -> bytes:
    """A good archive with something else in its directory, which stands at the end."""
    content = archive(_GOOD)
    begin = content.index(b"PK\x01\x02")
    return content[:begin] + change(content[begin:])


# Whole files: name -> (content, what the refusal says)
CONTAINERS: dict[str, tuple[bytes, str]] = {
    "text_file": (b"import os\n", "neither a zip nor a pickle"),
    "compressed_bomb": (
        archive(b"\x80\x02X" + struct.pack("<I", 2**26) + b"a" * 2**26 + b".", compression=zipfile.ZIP_DEFLATED),
        "is compressed",
    ),
    "path_traversal": (archive(_GOOD, others=[("archive/../../../canary", b"x")]), "is outside the archive"),
    "absolute_path": (archive(_GOOD, others=[("/tmp/canary", b"x")]), "is outside the archive"),
    "two_pickles": (archive(_GOOD, others=[("other/data.pkl", _GOOD)]), "2 entries NAME/data.pkl"),
    "no_pickle": (
        _renamed(
            _renamed(archive(_GOOD), b"archive/data.pkl", b"archive/data.xyz"),
            b"archive/data.pkl",
            b"archive/data.xyz",
            True,
        ),
        "0 entries",
    ),
    "entries_of_one_name": (
        _renamed(
            _renamed(archive(_GOOD, [("0", b"\0" * 16), ("1", b"\1" * 16)]), b"data/1", b"data/0"),
            b"data/1",
            b"data/0",
            True,
        ),
        "two entries with one name",
    ),
    "storage_missing": (archive(_GOOD, []), "storage 0, which the zip file does not contain"),
    "storage_too_short": (archive(_GOOD, [("0", b"\0" * 12)]), "12 bytes, but the pickle expects 4 elements"),
    "big_endian": (_renamed(archive(_GOOD), b"little", b"bigbig"), "not stored little-endian"),
    "name_in_the_header_differs": (
        _renamed(archive(_GOOD), b"archive/data/0", b"archive/data/9"),
        "not at the offset of its directory",
    ),
    "entry_beyond_the_end": (
        _with_directory(lambda entries: entries[:20] + struct.pack("<II", 2**30, 2**30) + entries[28:]),
        "extends beyond its end|overlap",
    ),
    "encrypted": (_with_directory(lambda entries: entries[:8] + b"\x01" + entries[9:]), "is encrypted"),
    "overlapping_entries": (
        _with_directory(lambda entries: entries[:20] + struct.pack("<II", 600, 600) + entries[28:]),
        "overlap|extends beyond",
    ),
    "cut_off": (archive(_GOOD)[:-30], "damaged zip"),
    "directory_missing": (archive(_GOOD)[:100], "damaged zip"),
}
