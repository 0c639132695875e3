"""The project's rules as functions of one parsed file: each yields (line, message) for every violation."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

from tests.helpers.architecture.deepspeed_names import DEEPSPEED_PRIVATE
from tests.helpers.architecture.syntax import (
    changed_name,
    defined_names,
    dotted,
    foreign_names,
    imports,
    is_function,
    is_shadowed,
    is_true,
    is_type_checking,
    makes_mutable,
)
from tests.helpers.architecture.tables import (
    BANNED_WORDS,
    COMPANIONS,
    DEEPSPEED_DOOR,
    DEEPSPEED_PUBLIC,
    FILES_OF_THEIR_OWN,
    HOMES,
    LINES_THAT_DESCRIBE_THEMSELVES,
    LISTS,
    LOADED_LATER,
    MAXIMUM_FILE_LINES,
    MAXIMUM_FOLDER_FILES,
    MAXIMUM_FUNCTION_LINES,
    NAMES_FORMATS,
    OPTIONAL_PACKAGES,
    PACKAGE_PLACES,
    PROGRAM_FOLDERS,
    PROGRAMS,
    PROJECTS,
    STATEFUL_FILES,
    SUBPACKAGE_ORDER,
    USES_RUN_CONFIG,
)

Finding = tuple[int, str]

_READS_A_FILE = re.compile(r"\bread_plain|\.read\(|\.read_text\(|\.read_bytes\(")


@dataclass(frozen=True)
class Source:
    """A file, parsed when a rule first asks, and its path in the repository."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree, which most rules look at."""
        return tuple(ast.walk(self.tree))

    @property
    def package(self) -> str | None:
        """The package of a file under megatron/ or trident/; None for their `__init__.py` and for files outside."""
        parts = PurePosixPath(self.path).with_suffix("").parts
        return parts[1] if self.is_library and parts[1] != "__init__" else None

    @property
    def module(self) -> str:
        """The dotted name of the file; of an `__init__.py` with `__init__` at its end."""
        return ".".join(PurePosixPath(self.path).with_suffix("").parts)

    @property
    def is_library(self) -> bool:
        """Whether the file belongs to the trainer or to a companion."""
        return self.path.startswith(("megatron/", "trident/"))

    @property
    def is_companion(self) -> bool:
        """Whether the file belongs to a companion of the trainer."""
        return self.path.startswith("trident/")

    @property
    def is_program(self) -> bool:
        """Whether the file is an entry point."""
        first = PurePosixPath(self.path).with_suffix("").parts[0]
        return first in PROGRAMS or first in PROGRAM_FOLDERS

    def is_in(self, homes: tuple[str, ...]) -> bool:
        """Whether the file is one of these files or is in one of these folders."""
        return any(self.path == home or (home.endswith("/") and self.path.startswith(home)) for home in homes)


Rule = Callable[[Source], Iterator[Finding]]


def imports_follow_the_package_order(source: Source) -> Iterator[Finding]:
    """A package only imports packages before it in the order, and no companion of the trainer; never relatively."""
    own = source.package
    for node, module in imports(source.nodes):
        if module.startswith("."):
            yield node.lineno, f"relative import of {module}: write the whole name"
            continue
        parts = module.split(".")
        if parts[0] == "tests" and (source.is_library or source.is_program):
            yield node.lineno, "the product imports its tests"
        if source.is_library and (parts[0] in PROGRAMS or parts[0] in PROGRAM_FOLDERS):
            yield node.lineno, f"the package imports the program {module}"
        if parts[0] not in ("megatron", "trident") or len(parts) < 2 or own is None:
            continue
        other = parts[1]
        if other == own or other.startswith("__"):
            continue
        if parts[0] == "trident":
            yield node.lineno, f"{own} imports {other}, a companion of the trainer, which only programs may"
            continue
        if source.is_companion:
            if own not in COMPANIONS:
                yield node.lineno, f"{own} is an unknown companion; name it in COMPANIONS"
            continue
        if other not in PACKAGE_PLACES or own not in PACKAGE_PLACES:
            yield (
                node.lineno,
                f"{other if own in PACKAGE_PLACES else own} is an unknown package; give it a place in PACKAGE_PLACES",
            )
        elif PACKAGE_PLACES[other] >= PACKAGE_PLACES[own]:
            yield node.lineno, f"{own} imports {other}, which does not come before it"


def subpackage_imports_follow_the_order(source: Source) -> Iterator[Finding]:
    """Inside a package, a sub-package only imports sub-packages before it (`SUBPACKAGE_ORDER`)."""
    for node, module in imports(source.nodes):
        for name in _imported_modules(node, module):
            for parent, order in SUBPACKAGE_ORDER.items():
                if not (source.module.startswith(parent + ".") and name.startswith(parent + ".")):
                    continue
                own, other = (_entry(path, parent, order) for path in (source.module, name))
                if order.index(other) > order.index(own):
                    yield node.lineno, f"in {parent}, {own} imports {other}, which does not come before it"


def third_party_modules_have_one_home(source: Source) -> Iterator[Finding]:
    """Each foreign thing is touched in its home only; the `*_object` collectives nowhere."""
    for node, name in foreign_names(source.nodes):
        for thing, homes in HOMES.items():
            if (name == thing or name.startswith(thing + ".")) and not source.is_in(homes):
                yield node.lineno, f"{name} outside of {', '.join(homes) or 'any place'}"
        last = name.rsplit(".", 1)[-1]
        if "_object" in last and ("distributed" in name or name.startswith("dist.")):
            yield node.lineno, f"{last} pickles; send JSON over parallel/messages.py"
    for node in source.nodes:
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and is_true(node.value):
            yield node.value.lineno, "allow_pickle=True"


def files_are_replaced_and_read_in_one_place(source: Source) -> Iterator[Finding]:
    """Only `megatron/files` renames, syncs and parses the JSON of a file (`FILES_OF_THEIR_OWN` says who else may)."""
    if not (source.is_library or source.is_program) or source.is_in(FILES_OF_THEIR_OWN):
        return
    for node in source.nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, first = dotted(node.func), ast.unparse(node.args[0]) if node.args else ""
        is_of_path = node.func.attr in ("replace", "rename") and len(node.args) == 1 and not node.keywords
        is_of_path = is_of_path and not first.startswith(("*", "dict"))
        if name in ("os.replace", "os.rename", "os.fsync", "shutil.move") or is_of_path:
            yield node.lineno, f"{name or node.func.attr}; use megatron.files.replacing"
        if name == "json.load" or (name in ("json.loads", "orjson.loads") and _READS_A_FILE.search(first)):
            yield node.lineno, f"{name}({first}); use read_plain_json of megatron.files.plain"


def deepspeed_has_one_door(source: Source) -> Iterator[Finding]:
    """What DeepSpeed does not document is touched in one folder only (`DEEPSPEED_DOOR`)."""
    if source.path.startswith(DEEPSPEED_DOOR) or not source.is_library:
        return
    for node, name in foreign_names(source.nodes):
        is_public = any(name == public or f"{name}.".startswith(f"{public}.") for public in DEEPSPEED_PUBLIC)
        is_part = any(public.startswith(f"{name}.") for public in DEEPSPEED_PUBLIC)
        if name.startswith("deepspeed.") and not (is_public or is_part):
            yield node.lineno, f"{name} is not documented: {DEEPSPEED_DOOR} is the place for it"
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            owner = dotted(node.value).rpartition(".")[2]
            is_private = (
                node.attr.startswith("_") and not node.attr.endswith("__") and owner in ("deepspeed", "wrapper")
            )
            if is_private or node.attr in DEEPSPEED_PRIVATE:
                yield node.lineno, f"{node.attr} is DeepSpeed's own: {DEEPSPEED_DOOR} is the place for it"
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr"):
            for argument in node.args[1:2]:
                if isinstance(argument, ast.Constant) and argument.value in DEEPSPEED_PRIVATE:
                    yield node.lineno, f"{argument.value} is DeepSpeed's own: {DEEPSPEED_DOOR} is the place for it"


def no_mutable_module_state(source: Source) -> Iterator[Finding]:
    """Module-level containers are constants: upper case, never changed; no object at module level is written to."""
    if source.path in STATEFUL_FILES:
        return
    names: set[str] = set()
    for node in source.tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if not isinstance(target, ast.Name):
                continue
            names.add(target.id)
            is_constant = target.id.upper() == target.id or target.id.startswith("__")
            if node.value is not None and makes_mutable(node.value) and not is_constant:
                yield node.lineno, f"{target.id} is a mutable value at module level; a constant is upper case"
    for node in source.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                if makes_mutable(default):
                    yield default.lineno, f"{node.name} has a mutable default value"
        changed = changed_name(node)
        if changed in names and not is_shadowed(source.tree, node, changed):
            yield node.lineno, f"{changed} stands at module level and is changed here"


def files_and_functions_are_short(source: Source) -> Iterator[Finding]:
    """A file has at most 500 lines, a function at most 60."""
    lines = source.text.count("\n")
    if lines > MAXIMUM_FILE_LINES:
        yield 1, f"{lines} lines; a file has at most {MAXIMUM_FILE_LINES}"
    if lines <= MAXIMUM_FUNCTION_LINES:
        return
    for node in source.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAXIMUM_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines; a function has at most {MAXIMUM_FUNCTION_LINES}"


def imports_are_at_the_top(source: Source) -> Iterator[Finding]:
    """Inside a function only an optional package in the file that owns it; entry points are free there."""
    for function in source.nodes:
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node, module in imports(ast.walk(function)):
            owners = [
                files
                for package, files in OPTIONAL_PACKAGES.items()
                if module == package or module.startswith(package + ".")
            ]
            if any(source.is_in(files) for files in owners):
                continue
            if source.is_program:
                continue
            yield node.lineno, f"{function.name} imports {module}; imports stand at the top of the file"


def entry_points_start_light(source: Source) -> Iterator[Finding]:
    """An entry point imports at its top the standard library, errors, log, exits, files, config and a rank's start."""
    if not source.is_program or source.path.endswith("/log_style.py") or source.is_in(LOADED_LATER):
        return
    itself = ("pretrain_gpt", f"{source.module.rpartition('.')[0]}.flags")  # an entry point, and the program's flags
    for node in source.tree.body:
        for inner, module in imports(ast.walk(node)) if not is_type_checking(node) and not is_function(node) else ():
            root = module.split(".")[0]
            if root == "megatron":
                light = ("megatron", "megatron.__version__", "megatron.log", "megatron.errors", "megatron.config")
                light += ("megatron.process_exit", "megatron.parallel.rank_start", "megatron.train.signals")
                if module in light or module.startswith(("megatron.config.", "megatron.files.")):
                    continue
            elif root in sys.stdlib_module_names or module in itself:
                continue
            yield (
                inner.lineno,
                f"{module} at the top of an entry point: --help would wait for it; import it inside main()",
            )


def config_is_pure(source: Source) -> Iterator[Finding]:
    """`config/` needs only the standard library: no torch, no numpy, nothing to install."""
    if source.package != "config":
        return
    for node, module in imports(source.nodes):
        root = module.split(".")[0]
        owned = source.is_in(OPTIONAL_PACKAGES.get(root, ()))
        if root not in sys.stdlib_module_names and root != "megatron" and not owned:
            yield node.lineno, f"config imports {module}"


def names_are_whole_words(source: Source) -> Iterator[Finding]:
    """No module, class, function, argument or variable of the package is called args, cfg, utils and the like."""
    if not source.is_library:
        return
    for part in PurePosixPath(source.path).with_suffix("").parts:
        for word in _banned_words(part):
            yield 1, f'the file or folder name {part} contains "{word}"'
    for line, name in defined_names(source.nodes):
        for word in _banned_words(name):
            yield line, f'{name} contains "{word}"'


def everything_public_is_described(source: Source) -> Iterator[Finding]:
    """Modules, public classes and longer functions have a docstring, unless a property or an override."""
    if not (source.is_library or source.is_program):
        return
    if not ast.get_docstring(source.tree):
        yield 1, "the module has no docstring"
    for node in source.tree.body:
        yield from _undescribed(node)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            is_protocol = any(dotted(base).endswith("Protocol") for base in node.bases)
            for member in node.body:
                if not is_protocol:
                    yield from _undescribed(member, node)


def packages_import_without_side_effects(source: Source) -> Iterator[Finding]:
    """An `__init__.py` holds a docstring, imports and constants."""
    if not (source.is_library and source.path.endswith("/__init__.py")):
        return
    for position, node in enumerate(source.tree.body):
        is_docstring = position == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_constant = isinstance(node, (ast.Assign, ast.AnnAssign)) and not any(
            isinstance(inner, ast.Call) for inner in ast.walk(node)
        )
        if not (is_docstring or is_constant or isinstance(node, (ast.Import, ast.ImportFrom))):
            yield node.lineno, "an __init__.py only imports"


def no_project_is_named(source: Source) -> Iterator[Finding]:
    """The package serves the programs of other projects through `megatron.config.Program`, and names none of them."""
    if not source.is_library or source.path in NAMES_FORMATS:
        return
    docstrings = {id(node.value) for node in source.nodes if isinstance(node, ast.Expr)}
    texts = [
        (node.lineno, node.value)
        for node in source.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]
    for line, text in [*texts, *defined_names(source.nodes)]:
        named = re.search(PROJECTS, text, flags=re.IGNORECASE)
        if named:
            yield line, f"{named.group()} is the name of a project of examples/"


def few_modules_use_the_run_config(source: Source) -> Iterator[Finding]:
    """Only the modules in USES_RUN_CONFIG use `RunConfig`; all others take the smallest section."""
    if not source.is_library or source.is_in(USES_RUN_CONFIG):
        return
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and any(alias.name in ("RunConfig", "RunRequest") for alias in node.names):
            yield node.lineno, "imports the whole configuration (RunConfig); take the smallest section of it"


def the_model_only_knows_its_config(source: Source) -> Iterator[Finding]:
    """The model package imports only `ModelConfig`, and the names of its choices, from config."""
    if source.package != "model":
        return
    for node in source.nodes:
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        if isinstance(node, ast.ImportFrom) and module.startswith("megatron.config"):
            for alias in node.names:
                is_choice = module.startswith("megatron.config.architecture.") and alias.name.isupper()
                if alias.name != "ModelConfig" and not is_choice:
                    yield node.lineno, f"imports {alias.name}; a layer takes ModelConfig only"


RULES: tuple[Rule, ...] = (
    imports_follow_the_package_order,
    subpackage_imports_follow_the_order,
    third_party_modules_have_one_home,
    files_are_replaced_and_read_in_one_place,
    deepspeed_has_one_door,
    no_mutable_module_state,
    files_and_functions_are_short,
    imports_are_at_the_top,
    entry_points_start_light,
    config_is_pure,
    names_are_whole_words,
    everything_public_is_described,
    packages_import_without_side_effects,
    no_project_is_named,
    few_modules_use_the_run_config,
    the_model_only_knows_its_config,
)


def crowded_folders(paths: Iterable[str]) -> Iterator[str]:
    """A message for each folder with more files than `MAXIMUM_FOLDER_FILES`, but for lists; without its sub-folders."""
    counts = Counter(PurePosixPath(path).parent.as_posix() for path in paths)
    for folder, count in sorted(counts.items()):
        if count > MAXIMUM_FOLDER_FILES and not f"{folder}/".startswith(LISTS):
            yield f"{folder} has {count} files; a folder has at most {MAXIMUM_FOLDER_FILES}"


def _imported_modules(node: ast.stmt, module: str) -> list[str]:
    """The modules that an import may mean: `from a import b` names a.b where b is a module."""
    if isinstance(node, ast.ImportFrom) and module in SUBPACKAGE_ORDER:
        return [f"{module}.{alias.name}" for alias in node.names]
    return [module]


def _entry(module: str, parent: str, order: tuple[str, ...]) -> str:
    """The sub-package of `parent` that a module is in; "." if it is a module of `parent` itself."""
    first = module.removeprefix(parent + ".").split(".")[0]
    return first if first in order else "."


def _banned_words(name: str) -> list[str]:
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return sorted(BANNED_WORDS.intersection(snake.split("_")))


def _undescribed(node: ast.stmt, owner: ast.ClassDef | None = None) -> Iterator[Finding]:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
        return
    if not ast.get_docstring(node) and (isinstance(node, ast.ClassDef) or not _needs_no_docstring(node, owner)):
        yield node.lineno, f"{owner.name + '.' if owner else ''}{node.name} has no docstring"


def _needs_no_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef, owner: ast.ClassDef | None) -> bool:
    """True of a property, of a method that a base class describes, and of a function short enough to read instead."""
    decorators = {dotted(decorator).rpartition(".")[2] for decorator in function.decorator_list}
    is_described = bool(decorators & {"property", "cached_property", "setter"} or (owner and owner.bases))
    length = (function.end_lineno or 0) - function.lineno + 1
    return is_described or len(function.body) == 1 or length <= LINES_THAT_DESCRIBE_THEMSELVES
