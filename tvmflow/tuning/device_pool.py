"""The devices with one key at an RPC tracker, and calls that run with one of them.

A device that dies, hangs or refuses costs a session, never a trial: the call is repeated on the
next free device. A candidate is to blame when it fails in two sessions.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.errors import StageError
from tvmflow.core.fork_server import ChildFunction, ForkServer
from tvmflow.core.formatting import count_text
from tvmflow.core.generated_text import shell_word
from tvmflow.core.types import Json
from tvmflow.targets.tracker import (
    TRACKER_VARIABLE,
    DeviceLease,
    DevicePoolStatus,
    Tracker,
    split_address,
)
from tvmflow.tuning.trials import Failure
from tvmflow.tuning.tuning_job import read_failure

# A session that its own server does not end in time is ended here so much later.
_GRACE_S: Final = 2.0
# How many sessions may fail before the device is to blame, and how many before the candidate is.
_MAX_DEVICE_FAULTS: Final = 3
_MAX_CANDIDATE_FAILURES: Final = 2
# Waiting ends when no device became free for as long as this many sessions may take.
_PATIENCE_SESSIONS: Final = 10
_POLL_S: Final = 2.0
_log = logging.getLogger(__name__)

MayContinue = Callable[[], bool]
"""Asked before work begins; false ends the waiting for a device."""


class RpcEndpoint(NamedTuple):
    """The place where devices are requested: those with `key` at a tracker (`HOST:PORT`).

    Attributes:
        priority: The priority of the requests; the tracker serves higher ones first.
        timeout_s: The longest that a session may take.
    """

    tracker: str
    key: str
    priority: int
    timeout_s: float

    @classmethod
    def from_settings(cls, remote: Mapping[str, Json]) -> RpcEndpoint:
        """Return the endpoint in a target's `remote`.

        Raises:
            StageError: Neither the recipe nor the environment names the tracker.
        """
        address = remote.get("tracker") or os.environ.get(TRACKER_VARIABLE, "")
        try:
            split_address(address)
        except ValueError as error:
            reason = error if address else f"neither the recipe nor ${TRACKER_VARIABLE} names one"
            raise StageError(
                f"there is no RPC tracker for the device '{remote['key']}': {reason}",
                fix=f"set {TRACKER_VARIABLE}=HOST:PORT, or remote.tracker of the target in the recipe",
            ) from error
        return cls(address, remote["key"], remote["priority"], remote["timeout_s"])


class SessionResult(NamedTuple):
    """The result of a call in a child: its value, or its failure; and the device's address."""

    value: Json
    failure: Failure | None
    server: str


class DevicePool:
    """The devices of one endpoint. Safe to use from several threads."""

    def __init__(self, endpoint: RpcEndpoint, fork_server: ForkServer, log: Path | None) -> None:
        self.endpoint = endpoint
        self._tracker = Tracker(endpoint.tracker)
        self._fork_server = fork_server
        self._log = log
        self._lock = threading.Lock()
        self._sessions = 0
        self._last_change = time.monotonic()

    def size(self) -> int:
        """Return the number of devices, busy or free.

        Raises:
            StageError: There is none.
        """
        devices = self._tracker.list_devices()
        if self.endpoint.key not in devices:
            raise self._no_device_error(devices)
        return devices[self.endpoint.key].total

    def call(
        self,
        function: ChildFunction | str,
        payload: Mapping[str, Json],
        may_continue: MayContinue = lambda: True,
        sessions: int = 1,
    ) -> SessionResult | None:
        """Run a function with a device in a child; again on another device if the device fails.

        Args:
            function: The function, or its `module:name`; its payload gets the field `session`.
            payload: The other fields.
            may_continue: Asked while it waits for a device.
            sessions: The time limit in numbers of sessions.

        Returns:
            The result; None when `may_continue` turned false before the call began.

        Raises:
            StageError: Neither the function nor one device is to blame.
        """
        timeout_s = self.endpoint.timeout_s * sessions
        faults = failures = 0
        while True:
            lease = self._wait_for_device(may_continue)
            if lease is None:
                return None
            try:
                request = {**payload, "session": [*lease, timeout_s]}
                result = self.call_here(function, request, timeout_s + _GRACE_S, lease.address)
            finally:
                self._count_session(-1)
            if result.failure is None:
                return result
            _log.debug("%s failed at %s: %s", function, lease.address, result.failure)
            if result.failure.phase == "run":
                failures += 1
            else:
                faults += 1
            if failures == _MAX_CANDIDATE_FAILURES:
                return result
            if faults == _MAX_DEVICE_FAULTS:
                raise StageError(
                    f"the devices with the key '{self.endpoint.key}' cannot be used; the last, "
                    f"{result.server}: {result.failure.message}",
                    fix="check that the target in the recipe describes the devices and that their "
                    "servers have the same version of TVM; run it again to resume",
                )

    # ---------------------------------------------------------------- waiting for a device

    def _wait_for_device(self, may_continue: MayContinue) -> DeviceLease | None:
        """Return a lease, however long others need the devices, as long as there are any."""
        started = last_poll = last_seen = time.monotonic()

        def keep_waiting() -> bool:
            nonlocal last_poll, last_seen
            instant = time.monotonic()
            if instant - last_poll > _POLL_S:
                last_poll = instant
                devices = self._tracker.list_devices()
                if self.endpoint.key in devices:
                    last_seen = instant
                elif instant - last_seen > self.endpoint.timeout_s:
                    # A server that is being restarted had the time for it.
                    raise self._no_device_error(devices)
                self._check_patience(started, devices.get(self.endpoint.key))
            return may_continue()

        lease = self._tracker.request(self.endpoint.key, self.endpoint.priority, keep_waiting)
        if lease is not None:
            self._count_session(+1)
        return lease

    def _check_patience(self, started: float, devices: DevicePoolStatus | None) -> None:
        """Check that a device was used or became free lately.

        Raises:
            StageError: It has been too long.
        """
        idle_s = time.monotonic() - max(started, self._last_change)
        if self._sessions or idle_s < _PATIENCE_SESSIONS * self.endpoint.timeout_s:
            return
        state = (
            f"{devices.total} registered, {devices.free} free, "
            f"{count_text(devices.pending, 'waiting request')}"
            if devices
            else "none is registered"
        )
        raise StageError(
            f"no device with the key '{self.endpoint.key}' became free in {idle_s:.0f} s ({state})",
            fix="check whether others use the devices or their servers hang (`tvmflow device ls`); "
            "run it again to resume",
        )

    def _count_session(self, change: int) -> None:
        with self._lock:
            self._sessions += change
            self._last_change = time.monotonic()

    def _no_device_error(self, devices: Mapping[str, DevicePoolStatus]) -> StageError:
        tracker, key = self.endpoint.tracker, self.endpoint.key
        others = ", ".join(f"{other.key} ({other.total})" for other in devices.values())
        return StageError(
            f"the RPC tracker at {tracker} has no device with the key '{key}'; "
            f"it has {others or 'no devices'}",
            fix=f"run `tvmflow device serve --tracker {shell_word(tracker)} --key {shell_word(key)}` on the device, "
            "or correct remote.key of the target in the recipe",
        )

    # ---------------------------------------------------------------- children

    def call_here(
        self,
        function: ChildFunction | str,
        payload: Mapping[str, Json],
        timeout_s: float,
        server: str = "",
    ) -> SessionResult:
        """Run a function in a child of this machine; `server` is the device that it uses, if any."""
        phases: list[str] = []
        outcome = self._fork_server.call(
            function,
            payload,
            timeout_s=timeout_s,
            log=self._log,
            emit=lambda event: phases.append(event["phase"]),
        )
        return SessionResult(outcome.value, read_failure(outcome, phases), server)
