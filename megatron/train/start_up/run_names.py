"""Generated names of runs: one rank draws and reserves a name, which replaces `{run}` or `{experiment}` in folders."""

from __future__ import annotations

import random
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron.config import ConfigSection
from megatron.errors import StorageError
from megatron.parallel.agreement import run_on_first
from megatron.parallel.mesh import ParallelMesh

_ADJECTIVES = (
    "able airy amber ample bold brave breezy bright brisk calm candid cheerful clear clever cordial cosy crisp "
    "curious daring deft eager earnest easy fair famous fearless fleet fluent fond frank fresh gentle glad golden "
    "graceful grand hardy hearty honest humble ideal jolly jovial keen kind lively loyal lucid lucky mellow merry "
    "mild modest neat nimble noble patient placid playful polite prompt proud quick quiet radiant rapid ready "
    "robust rosy serene sharp silent simple sincere smart smooth sober solid spry steady stoic sunny sure swift "
    "tender thrifty tidy tranquil upbeat vivid warm wise witty zesty"
)
_SURNAMES = (
    "abel agnesi archimedes avicenna babbage banach bernoulli bohr boole borel brahe cantor cartan cauchy cayley "
    "chebyshev church conway copernicus coulomb curie dedekind descartes dijkstra dirac dirichlet edison einstein "
    "erdos euclid euler faraday fermat fermi feynman fibonacci fourier franklin galileo galois gauss germain godel "
    "goldbach hadamard hamilton hardy hausdorff heisenberg hertz hilbert hopper huygens hypatia jacobi joule kepler "
    "khayyam klein knuth kolmogorov kovalevskaya lagrange laplace lebesgue legendre leibniz lie liouville lorenz "
    "lovelace lyapunov markov maxwell mendeleev minkowski mirzakhani nash newton nightingale noether ohm pascal "
    "pauli peano pearson planck poincare poisson ptolemy pythagoras ramanujan riemann russell rutherford "
    "schrodinger shannon sierpinski somerville tarski taylor tesla thales turing volta wiener zeno"
)
ADJECTIVES, SURNAMES = tuple(_ADJECTIVES.split()), tuple(_SURNAMES.split())
_MOST_DRAWS = 1000

Choose = Callable[[Sequence[str]], str]
NameForm = Callable[[Choose, float], str]


def run_name(choose: Choose, at: float) -> str:
    """A memorable name such as `gentle_lovelace-26112211`: two words and the hour of the start.

    Args:
        choose: draws one of several words.
        at: the start, in seconds since the epoch.

    Source: the form `adjective_surname-%y%m%d%H`, geroldcsendes/gpt2-all-in README; the words are our own choice.
    """
    return f"{choose(ADJECTIVES)}_{choose(SURNAMES)}-{time.strftime('%y%m%d%H', time.localtime(at))}"


def experiment_name(choose: Choose, at: float) -> str:
    """A name that sorts by start time, such as `bert_pretrain.2026.11.22.12.05.59.3f8a1c07`.

    Of the last eight digits, the first five are the microsecond and the others are random.

    Args:
        choose: draws one of several characters.
        at: the start, in seconds since the epoch.

    Source: microsoft/DeepSpeedExamples, training/HelloDeepSpeed/train_bert.py, `create_experiment_dir`.
    """
    second = int(at)
    drawn = "".join(choose("0123456789abcdef") for _ in range(3))
    microsecond = int((at - second) * 1e6)
    return f"bert_pretrain.{time.strftime('%Y.%m.%d.%H.%M.%S', time.localtime(second))}.{microsecond:05x}{drawn}"


_FORMS: Mapping[str, NameForm] = types.MappingProxyType({"{run}": run_name, "{experiment}": experiment_name})


def reserve_name(parent: Path, choose: Choose, at: float, form: NameForm = run_name) -> str:
    """Creates a folder with a new, unique name, and returns the name.

    Raises:
        StorageError: the folder cannot be created, or all drawn names are taken.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_MOST_DRAWS):
            name = form(choose, at)
            try:
                (parent / name).mkdir()
            except FileExistsError:
                continue
            return name
    except OSError as failure:
        raise StorageError(
            f"a folder for the run cannot be created in {parent}: {failure.strerror}. Use another (--run-dir)."
        ) from failure
    raise StorageError(
        f"{parent} already has runs with all {_MOST_DRAWS} drawn names. Use another folder or name (--run-dir)."
    )


def with_run_name(
    sections: Mapping[str, ConfigSection], run_dir: str | None, mesh: ParallelMesh
) -> dict[str, ConfigSection]:
    """Replaces the placeholder of --run-dir in all sections by a new name; collective over the mesh.

    Raises:
        StorageError: see `reserve_name`.
    """
    placeholder = next((placeholder for placeholder in _FORMS if placeholder in (run_dir or "")), None)
    if placeholder is None or run_dir is None:
        return dict(sections)
    parent = Path(run_dir.partition(placeholder)[0])
    # Seeded by the operating system, so that runs with the same --seed draw different names.
    choose = random.SystemRandom().choice
    name = run_on_first(mesh, lambda: reserve_name(parent, choose, time.time(), _FORMS[placeholder]))
    return {key: _with_name(section, placeholder, name) for key, section in sections.items()}


def _with_name(section: ConfigSection, placeholder: str, name: str) -> ConfigSection:
    texts = {key: value for key, value in vars(section).items() if isinstance(value, str) and placeholder in value}
    changes = {key: text.replace(placeholder, name) for key, text in texts.items()}
    return replace(section, **changes)  # type: ignore[type-var]
