"""Random games for the property tests: scales, temperatures and references from tame to extreme."""

import hypothesis.strategies as st
import numpy as np

from stackalign import games

# Few shapes, so that few programs are compiled: contexts, Leader actions, Follower actions.
SHAPES = ((3, 2, 4), (1, 5, 3), (2, 1, 1))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def random_game(
    seed: int, shape=SHAPES[0], *, scale=1.0, offset=0.0, tau_leader=0.3, tau_follower=0.5, spread=1.0, uniform=False
) -> games.Game:
    """Utilities of size `scale` around `offset`; references whose log-probabilities spread over about `spread`."""
    rng = np.random.default_rng(seed)
    return games.make_game(
        offset + scale * rng.uniform(-1.0, 1.0, shape),
        prior=rng.dirichlet(np.ones(shape[0])) if shape[0] > 1 else None,
        log_pi_ref=None if uniform else log_softmax(spread * rng.normal(size=shape[:2])),
        log_omega_ref=None if uniform else log_softmax(spread * rng.normal(size=shape)),
        tau_leader=tau_leader,
        tau_follower=tau_follower,
    )


def random_policies(seed: int, game: games.Game, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = game.utility.shape
    return log_softmax(spread * rng.normal(size=shape[:2])), log_softmax(spread * rng.normal(size=shape))


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    """Powers of ten between two exponents."""
    return st.floats(low, high).map(lambda exponent: float(10.0**exponent))


@st.composite
def game_arguments(draw) -> dict:
    """Arguments of `random_game`."""
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "shape": draw(st.sampled_from(SHAPES)),
        "scale": draw(powers(-4, 4)),
        "offset": draw(st.sampled_from((0.0, 0.0, 1.0, -1e3))),
        "tau_leader": draw(powers(-3.5, 2)),
        "tau_follower": draw(powers(-3.5, 2)),
        "spread": draw(st.sampled_from((0.0, 1.0, 10.0, 100.0))),
        "uniform": draw(st.booleans()),
    }


@st.composite
def rates(draw) -> tuple[float, float]:
    """Effective steps `eta tau` of Leader and Follower within condition 6, the Follower's exactly 1 now and then."""
    follower = draw(st.one_of(st.just(1.0), st.floats(0.01, 1.0)))
    return follower * draw(st.floats(0.01, 0.99)), follower


def step_sizes(game: games.Game, rates: tuple[float, float]) -> dict[str, float]:
    leader, follower = rates
    return {"eta_leader": leader / float(game.tau_leader), "eta_follower": follower / float(game.tau_follower)}
