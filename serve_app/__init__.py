"""The live side: Ray Serve answers routing questions with a trained policy.

Reading order: `messages` (what goes over the wire), `served` (which policy that is), `decider`
(one decision), `decision_log`, `api` (HTTP) and `app` (Ray Serve).
"""
