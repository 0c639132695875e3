"""Names of runs that a person can tell apart and remember: `gentle_lovelace-26112211`.

Source: the form `adjective_surname-%y%m%d%H`, geroldcsendes/gpt2-all-in README; the words are our own choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

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

Choose = Callable[[Sequence[str]], str]


def run_name(choose: Choose, at: time.struct_time) -> str:
    """A name with the year, month, day and hour of its start.

    Args:
        choose: draws one of several words.
    """
    return f"{choose(ADJECTIVES)}_{choose(SURNAMES)}-{time.strftime('%y%m%d%H', at)}"
