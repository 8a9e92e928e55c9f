"""How many tokens the next request of a key and endpoint will cost, learned from those that have ended. No I/O."""

from __future__ import annotations

USUAL_TOKENS = 10_000  # of a request before any has ended
_NEWEST_WEIGHT = 0.2  # of the newest request in the moving average
# A request counts as at most twice the average, or twice USUAL_TOKENS if that is more. Otherwise one page of millions
# of tokens would raise the estimate so far that no later request fits into the limit.
_MAX_GROWTH = 2


class TokenEstimate:
    """Moving average of the tokens of a request, at least `min_tokens` and at most the limit of tokens in 60 s.

    `each` is what the next request reserves. Without a limit nothing is learned.
    """

    def __init__(self, limit: int | None, min_tokens: int) -> None:
        self._min_tokens = min_tokens
        self.set_limit(limit)

    def set_limit(self, limit: int | None) -> None:
        """Begin anew with another limit of tokens in 60 s; None is no limit."""
        self._limit = limit
        self.each = 1 if limit is None else min(max(self._min_tokens, USUAL_TOKENS), limit)

    def learn(self, tokens: int) -> None:
        """Use the cost of a request that has ended; 0 is an unknown cost."""
        if self._limit is None or not tokens:
            return
        counted = min(tokens, _MAX_GROWTH * max(self.each, USUAL_TOKENS))
        mean = round(self.each + _NEWEST_WEIGHT * (counted - self.each))
        # An estimate above the limit would stop all requests, so it would never fall again.
        self.each = min(max(self._min_tokens, mean), self._limit)


def turns_beyond_paid(requests_limit: int | None, tokens_limit: int, reserved: int, used: int) -> float:
    """Return how many turns a request cost beyond the one that its project paid for it; below 0: less than one.

    The project paid one turn for a request of `reserved` tokens, and `used` are its real ones. The cost of a request is
    the larger of its parts of both limits. With limits of 100 requests and 100,000 tokens, 1,000 tokens or fewer are
    1/100, and 5,000 are 5/100. So a request that reserved 1,000 tokens, and used 5,000, returns 4.
    """
    part_of_requests = 1 / requests_limit if requests_limit else 0.0
    paid = max(part_of_requests, reserved / tokens_limit)
    # More tokens than the limit stop the key for one minute, not longer: they count as the whole limit.
    cost = max(part_of_requests, min(used, tokens_limit) / tokens_limit)
    return cost / paid - 1
