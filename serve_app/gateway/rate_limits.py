"""Limits per caller: token buckets per minute, and quotas per day.

Tokens are reserved at arrival, prompt and longest answer, and settled at the end. All numbers are
whole: no rounding lets one more in.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from serve_app.gateway.callers import ANYBODY, Caller, CallerLimits

_MINUTE_NS = 60 * 10**9
_DAY_S = 86_400
_MAX_ADDRESSES = 65_536
"""Addresses that are known at a time; the one that has not asked for longest is forgotten."""
_NEVER_S = 60
"""Retry-After of a request that never fits, since clients expect one."""

Quantity = Literal["requests", "tokens"]
Code = Literal["rate_limit_exceeded", "insufficient_quota"]
Headers = list[tuple[bytes, bytes]]


class Now(NamedTuple):
    """A point in time, by two clocks."""

    ns: int
    """Reading of a clock that never goes back, nanoseconds."""
    day: int
    """Days of UTC since 1970."""
    left_of_day_s: int

    @classmethod
    def of(cls, ns: int, unix_s: float) -> Now:
        """Make the point from the readings of both clocks."""
        day, second = divmod(int(unix_s), _DAY_S)
        return cls(ns, day, _DAY_S - second)


@dataclass(frozen=True, slots=True)
class OverLimit:
    """Why a caller may not ask now, in the terms of OpenAI's clients."""

    reason: str
    retry_after_s: int
    code: Code
    kind: str
    """OpenAI's type of the error: the quantity, or `insufficient_quota`."""
    headers: Headers


class Bucket:
    """Units that come back evenly, up to the number for a minute.

    Levels count in 60 billionths of a unit, of which `per_minute` come back each nanosecond.
    """

    __slots__ = ("_at_ns", "level", "per_minute")

    def __init__(self, per_minute: int, now_ns: int) -> None:
        self.per_minute, self._at_ns = per_minute, now_ns
        self.level = per_minute * _MINUTE_NS

    def advance(self, now_ns: int) -> None:
        """Let units come back."""
        if now_ns > self._at_ns:
            self._fill((now_ns - self._at_ns) * self.per_minute)
            self._at_ns = now_ns

    def take(self, amount: int) -> None:
        """Take units, even more than there are; a negative number gives units back."""
        self._fill(-amount * _MINUTE_NS)

    def wait_ns(self, amount: int) -> int:
        """Time until that many units are there; 0: they are."""
        return max(-(-(amount * _MINUTE_NS - self.level) // self.per_minute), 0)

    @property
    def remaining(self) -> int:
        """Whole units that are left."""
        return max(self.level // _MINUTE_NS, 0)

    def change(self, per_minute: int) -> None:
        """Change the size of the bucket; the used units stay used."""
        self.per_minute = per_minute
        self._fill(0)

    def _fill(self, change: int) -> None:
        self.level = min(self.level + change, self.per_minute * _MINUTE_NS)


class Meter:
    """One caller's use of one quantity."""

    def __init__(
        self, what: Quantity, per_minute: int | None, per_day: int | None, now: Now
    ) -> None:
        self.what, self._per_day = what, per_day
        self._bucket = None if per_minute is None else Bucket(per_minute, now.ns)
        self._now, self._used = now, 0

    def advance(self, now: Now) -> None:
        """Go on in time; a clock that is set back a little starts no new day."""
        if self._bucket is not None:
            self._bucket.advance(now.ns)
        if now.day > self._now.day or now.day < self._now.day - 1:
            self._used = 0
        if now.day >= self._now.day or now.day < self._now.day - 1:
            self._now = now

    def change(self, per_minute: int | None, per_day: int | None, now: Now) -> None:
        """Change the limits; use so far still counts."""
        self.advance(now)
        self._per_day = per_day
        if per_minute is None:
            self._bucket = None
        elif self._bucket is None:
            self._bucket = Bucket(per_minute, now.ns)
        else:
            self._bucket.change(per_minute)

    def take(self, amount: int) -> None:
        """Add to the use; a negative number takes back."""
        if self._bucket is not None:
            self._bucket.take(amount)
        self._used = max(self._used + amount, 0)

    @property
    def day(self) -> int:
        """The day whose use is counted."""
        return self._now.day

    def return_to(self, amount: int, day: int) -> None:
        """Give back units that were taken on a day, which may be over."""
        used = self._used
        self.take(-amount)
        if day != self.day:
            self._used = used

    def refusal(self, amount: int) -> OverLimit | None:
        """Say why so many units may not be taken now; None: they may."""
        if self._per_day is not None and self._used + amount > self._per_day:
            left = max(self._per_day - self._used, 0)
            reason = f"{left} of {self._per_day} {self.what} are left for today, {amount} are asked"
            wait_s = self._now.left_of_day_s
            return OverLimit(f"quota exceeded: {reason}", wait_s, "insufficient_quota",
                             "insufficient_quota", self.headers())  # fmt: skip
        bucket = self._bucket
        if bucket is None or not (wait_ns := bucket.wait_ns(amount)):
            return None
        most = f"{bucket.per_minute} {self.what} per minute"
        reason, wait_s = f"{bucket.remaining} of {most} are left, {amount} are asked", _NEVER_S
        if amount > bucket.per_minute:
            reason = f"{amount} {self.what} are asked at once, more than {most}"
        else:
            wait_s = -(-wait_ns // 10**9)
        return OverLimit(
            f"rate limit reached: {reason}", wait_s, "rate_limit_exceeded", self.what,
            self.headers(),
        )  # fmt: skip

    def headers(self) -> Headers:
        """Return OpenAI's headers: the limit, the rest of it, and when it is whole again."""
        if self._bucket is not None:
            per_minute = self._bucket.per_minute
            reset = _duration(self._bucket.wait_ns(per_minute))
            shown = (per_minute, self._bucket.remaining, reset)
        elif self._per_day is not None:
            remaining = max(self._per_day - self._used, 0)
            shown = (self._per_day, remaining, _duration(self._now.left_of_day_s * 10**9))
        else:
            return []
        return [
            (f"x-ratelimit-{name}-{self.what}".encode(), str(value).encode())
            for name, value in zip(("limit", "remaining", "reset"), shown, strict=True)
        ]

    def saved(self) -> list[int | None]:
        """Return the use, for JSON."""
        level = None if self._bucket is None else self._bucket.level
        return [level, self.day, self._used]

    def restore(self, saved: list[int | None]) -> None:
        """Restore the use as of when it was saved; `advance` then lets units come back."""
        level, day, used = saved
        if self._bucket is not None and level is not None:
            self._bucket.level = min(self._bucket.level, level)
        if day == self.day:
            self._used = used or 0


class Account:
    """The use of one caller."""

    def __init__(self, limits: CallerLimits, now: Now) -> None:
        self.limits = limits
        per_minute, per_day = limits.requests_per_minute, limits.requests_per_day
        self.requests = Meter("requests", per_minute, per_day, now)
        self.tokens = Meter("tokens", limits.tokens_per_minute, limits.tokens_per_day, now)

    def change(self, limits: CallerLimits, now: Now) -> None:
        """Change the limits."""
        self.limits = limits
        self.requests.change(limits.requests_per_minute, limits.requests_per_day, now)
        self.tokens.change(limits.tokens_per_minute, limits.tokens_per_day, now)

    def take(self, num_tokens: int, now: Now) -> OverLimit | None:
        """Take a request and its tokens; if a limit forbids that, say why and take nothing."""
        for meter in (self.requests, self.tokens):
            meter.advance(now)
        refusal = self.requests.refusal(1) or self.tokens.refusal(num_tokens)
        if refusal is None:
            self.requests.take(1)
            self.tokens.take(num_tokens)
        return refusal

    def headers(self) -> Headers:
        """Return the headers of the limits per minute, or else per day."""
        return self.requests.headers() + self.tokens.headers()

    def saved(self) -> dict[str, Any]:
        """Return the use, for JSON."""
        return {"requests": self.requests.saved(), "tokens": self.tokens.saved()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the use."""
        self.requests.restore(saved["requests"])
        self.tokens.restore(saved["tokens"])


class Grant:
    """An admitted request, and the tokens that are reserved for it."""

    __slots__ = ("_account", "_day", "_reserved", "headers")

    def __init__(self, account: Account, reserved: int) -> None:
        self._account, self._reserved = account, reserved
        self._day, self.headers = account.tokens.day, account.headers()

    def settle(self, num_tokens: int) -> None:
        """Count the tokens that were used in place of the reserved ones."""
        self._account.tokens.return_to(self._reserved - num_tokens, self._day)

    def cancel(self) -> None:
        """Return everything: the gateway had no room."""
        self._account.requests.return_to(1, self._day)
        self.settle(0)


class RateLimits:
    """Counts the use of all callers."""

    def __init__(
        self,
        limits_of: Callable[[Caller], CallerLimits | None] = lambda _: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """Start with no use.

        `limits_of` returns what a caller may ask for, None where that is all, and raises a
        LookupError where the caller is not known any more.
        """
        self._limits_of, self._clock_ns, self._clock_s = limits_of, clock_ns, clock_s
        self._by_key: dict[str, Account] = {}
        self._by_address: OrderedDict[str, Account] = OrderedDict()
        self._restored: dict[str, Any] = {}
        self._restored_s = 0.0

    def admit(self, caller: Caller, num_tokens: int) -> Grant | OverLimit | None:
        """Admit a request of that many tokens, prompt and longest answer, or say why not.

        None: nothing is limited.
        """
        if caller is ANYBODY:
            return None
        try:
            limits = self._limits_of(caller)
        except LookupError:
            # The file of keys was read again while the body came.
            reason = "your key is being changed"
            return OverLimit(reason, 1, "rate_limit_exceeded", "requests", [])
        if limits is None:
            return None
        now = Now.of(self._clock_ns(), self._clock_s())
        account = self._account(caller, limits, now)
        return account.take(num_tokens, now) or Grant(account, num_tokens)

    def saved(self) -> dict[str, Any]:
        """Return the use of keys, for JSON; the use of addresses is forgotten."""
        now = Now.of(self._clock_ns(), self._clock_s())
        for account in self._by_key.values():
            account.requests.advance(now)
            account.tokens.advance(now)
        # Of keys that have not asked since the restart: their buckets are full a minute after.
        kept = {
            key: {what: [None, *value[1:]] for what, value in saved.items()}
            for key, saved in self._restored.items()
        }
        used = {key: account.saved() for key, account in self._by_key.items()}
        return {"saved_s": self._clock_s(), "keys": kept | used}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what was saved."""
        self._restored, self._restored_s = dict(saved["keys"]), float(saved["saved_s"])

    def _account(self, caller: Caller, limits: CallerLimits, now: Now) -> Account:
        if caller.key:
            account = self._by_key.get(caller.key)
            if account is None:
                account = self._by_key[caller.key] = self._opened(caller.key, limits, now)
        else:
            name, accounts = _network_of(caller.address), self._by_address
            account = accounts.get(name)
            if account is None:
                account = accounts[name] = Account(limits, now)
            accounts.move_to_end(name)
            if len(accounts) > _MAX_ADDRESSES:
                accounts.popitem(last=False)
        if account.limits is not limits:
            account.change(limits, now)
        return account

    def _opened(self, key: str, limits: CallerLimits, now: Now) -> Account:
        """Open the account of a key, with its use before a restart."""
        if key not in self._restored:
            return Account(limits, now)
        passed_ns = int(min(max(self._clock_s() - self._restored_s, 0.0), 60.0) * 1e9)
        account = Account(limits, now._replace(ns=now.ns - passed_ns))
        account.restore(self._restored.pop(key))
        return account


def _network_of(address: str) -> str:
    """Return what counts as one caller: an IPv4 address, or the /64 of an IPv6 one."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def _duration(ns: int) -> str:
    """Write a duration as OpenAI does: `6m0s`, `1.5s`, `20ms`."""
    ms = -(-ns // 10**6)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}" if minutes else text
