"""The simulators: what happens to requests once a policy has placed them."""
