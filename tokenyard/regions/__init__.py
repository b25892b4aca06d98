"""Regions: what share of each region's demand goes where, and which servers are on.

Read `scenario`, `topology` and `demand` for what is fixed, `state` for what a policy sees and
answers, `transport` and `activation` for how plans are made, `policies` for all that can decide,
`search` and `artifact` for what is learned.
"""
