"""Checks the states of a library by a sequence of steps.

Single calls are compared with the reference elsewhere, at many sizes. Here, each step must have the same bits as a
call that gets the tensors that the steps before have left, also after a fork, a truncation, and what was saved and
loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tvmflow.core.dimensions import choose_tuning_size, evaluate, specs_at
from tvmflow.core.errors import TvmflowError
from tvmflow.core.formatting import names_text, quoted
from tvmflow.core.types import Array, Dimension, Feed, Json, State
from tvmflow.stages.verify.comparison import has_same_bits
from tvmflow.stages.verify.inputs import draw_inputs, limit_draws
from tvmflow.stages.verify.libraries import Library, LocalLibrary
from tvmflow.stages.verify.verdict import StatesVerdict
from tvmflow.stages.verify_settings import VerifySettings

if TYPE_CHECKING:
    from tvmflow.runtime.sessions import Session
    from tvmflow.stages.verify.inputs import ImportedModel

    Sizes = Mapping[str, int]

_STEPS: Final = 5
_WHAT: Final = "what a call computes with the same states"


def check_states(
    library: Library,
    signature: Mapping[str, Json],
    model: ImportedModel,
    settings: VerifySettings,
) -> StatesVerdict | None:
    """Return the verdict on a sequence of steps; None without states, or where it runs elsewhere."""
    from tvmflow.runtime.sessions import holds_states

    if not isinstance(library, LocalLibrary) or not State.list_of(signature):
        return None
    if not holds_states(library.module.program):
        return None
    sequence = _Sequence(library, signature, model, settings)
    try:
        failure = sequence.run()
    except TvmflowError as error:
        failure = error.message
    verdict: StatesVerdict = {
        "passed": not failure,
        "steps": sequence.steps,
        "length": sequence.length,
    }
    return {**verdict, "failure": failure} if failure else verdict


class _Sequence:
    """Steps of a session beside calls.

    Attributes:
        steps: How many steps were compared.
        length: The length of the growing states after these.
    """

    def __init__(
        self,
        library: LocalLibrary,
        signature: Mapping[str, Json],
        model: ImportedModel,
        settings: VerifySettings,
    ) -> None:
        self._library, self._settings, self._model = library, settings, model
        self._states = State.list_of(signature)
        self._dimensions = Dimension.list_of(signature)
        self._outputs = {spec.name: spec for spec in library.outputs}
        self._session = library.module.session()
        self.steps = self.length = 0

    def run(self) -> str:
        """Return the problem; empty if there is none."""
        session, states = self._session, self._session.states
        before, feed, following = states, None, self._draw(0)
        while self.steps < _STEPS and following is not None:
            before, feed = states, following
            states, failure = self._compare(session, feed, before)
            if failure:
                return f"step {self.steps + 1}: {failure}"
            self.steps += 1
            self.length = session.length
            following = self._draw(self.steps)
        if feed is None:
            return "no step fits the ranges of the dimensions"
        following = following or feed
        return self._check_copies(following, states, feed, before) or self._check_reset()

    def _compare(self, session: Session, feed: Feed, states: Feed) -> tuple[dict[str, Array], str]:
        """Take a step and make the call beside it; return the states that follow, and the problem."""
        own = {spec.name: feed[spec.name] for spec in session.inputs}
        [expected] = self._library.run_all([{**own, **states}])
        for name, array in session.run(own).items():
            if not has_same_bits({name: array}, {name: expected[name]}):
                return states, f"the output {quoted(name)} is not {_WHAT}"
        following = {state.input: expected[state.output] for state in self._states}
        found = session.states
        for name, array in following.items():
            if not has_same_bits({name: found[name]}, {name: array}):
                return states, f"the state {quoted(name)} is not {_WHAT}"
        return following, ""

    def _check_copies(self, feed: Feed, states: Feed, last: Feed, before: Feed) -> str:
        """Compare steps after a fork, after a save and load, and after a truncation."""
        session, loaded = self._session, self._library.module.session()
        loaded.load(session.save())
        copies = [("a fork", session.fork(), feed, states), ("`load`", loaded, feed, states)]
        if self.length and all(state.axis is not None for state in self._states):
            length = next(iter(before.values())).shape[self._states[0].axis or 0]
            session.truncate(length)
            copies.append(("`truncate`", session, last, before))
        for name, copy, given, held in copies:
            if copy.length == self._find_limit():
                continue
            if failure := self._compare(copy, given, held)[1]:
                return f"after {name}, {failure}"
        return ""

    def _check_reset(self) -> str:
        self._session.reset()
        found = [(state, self._session.states[state.input]) for state in self._states]
        wrong = [
            state.input for state, array in found if array.tobytes() != state.content(array.nbytes)
        ]
        if wrong or self._session.length:
            return f"the states {names_text(wrong)} are not as at the beginning after `reset`"
        return ""

    def _find_limit(self) -> int:
        """Return the largest length of growing states; -1 if none grows."""
        dimension = self._session.length_dimension
        return dimension.max if dimension else -1

    def _draw(self, step: int) -> Feed | None:
        """Return inputs for the next step; None if none fits any more: the first are long, others short."""
        sizes = {
            entry.name: choose_tuning_size(entry) if step % 3 == 0 else entry.min
            for entry in self._dimensions
        }
        smallest = {entry.name: entry.min for entry in self._dimensions}
        for chosen in (sizes, smallest):
            if self._session.length_dimension:
                chosen[self._session.length_dimension.name] = self._session.length
            if self._fits(chosen):
                inputs = specs_at(self._session.inputs, chosen)
                limited = limit_draws(self._settings, self._model.operands, chosen)
                return next(draw_inputs(inputs, limited))
        return None

    def _fits(self, sizes: Sizes) -> bool:
        for state in self._states:
            if state.axis is not None:
                size = self._outputs[state.output].sizes[state.axis]
                return evaluate(size, sizes) <= self._find_limit()
        return True
