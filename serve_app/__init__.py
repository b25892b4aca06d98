"""The live side: requests go to the replica that a policy chooses.

Reading order: `cluster` (what is served), `gateway` (a request's path), `policy` (who decides),
`http`, `engines` (what generates), `allocation` (a pool that is reshaped under load), `regions`,
`ray_serve`; `app`, `router` and `autoscaling` are what others name.
"""
