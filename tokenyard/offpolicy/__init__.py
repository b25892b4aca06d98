"""Judging a policy by what another one did: sequential tests, off-policy estimates, replays."""
