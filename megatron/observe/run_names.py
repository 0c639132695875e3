"""Names of runs that a person can tell apart and remember: `gentle_lovelace-26112211`.

Folders on the command line may have `{run}` where the name of the run goes. The first rank reserves a name that no run
in the same folder has, and all ranks put it into their folders.

Source: the form `adjective_surname-%y%m%d%H`, geroldcsendes/gpt2-all-in README; the words are our own choice.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.config import ControlConfig
from megatron.errors import StorageError
from megatron.parallel.agreement import run_on_first
from megatron.parallel.mesh import ParallelMesh

PLACE = "{run}"
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


def run_name(choose: Choose, at: time.struct_time) -> str:
    """A name with the year, month, day and hour of its start.

    Args:
        choose: draws one of several words.
    """
    return f"{choose(ADJECTIVES)}_{choose(SURNAMES)}-{time.strftime('%y%m%d%H', at)}"


def reserve_name(parent: Path, choose: Choose, at: time.struct_time) -> str:
    """Makes a folder of a new name, which no other process can make as well, and returns the name.

    Raises:
        StorageError: the folder cannot be made, or every name that was drawn is taken.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_MOST_DRAWS):
            name = run_name(choose, at)
            try:
                (parent / name).mkdir()
            except FileExistsError:
                continue
            return name
    except OSError as failure:
        raise StorageError(
            f"a folder for the run cannot be made in {parent}: {failure.strerror}. Choose another (--run-dir)."
        ) from failure
    raise StorageError(
        f"{parent} holds a run of every one of the {_MOST_DRAWS} names that were drawn. Choose another folder, or name "
        "the run (--run-dir)."
    )


def with_run_name(control: ControlConfig, mesh: ParallelMesh) -> ControlConfig:
    """The same with a new run's name in the place of `{run}`; collective over the mesh.

    Raises:
        StorageError: see `reserve_name`.
    """
    before, place, _ = (control.run_dir or "").partition(PLACE)
    if not place:
        return control
    # Seeded by the operating system: runs that start at the same moment with the same --seed draw different names.
    choose = random.SystemRandom().choice
    name = run_on_first(mesh, lambda: reserve_name(Path(before), choose, time.localtime()))
    values = {field.name: getattr(control, field.name) for field in dataclasses.fields(control)}
    named: dict[str, Any] = {
        field: value.replace(PLACE, name)
        for field, value in values.items()
        if isinstance(value, str) and PLACE in value
    }
    return dataclasses.replace(control, **named)
