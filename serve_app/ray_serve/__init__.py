"""What runs inside Ray Serve: a pool's replica, and every import of Ray's private modules.

The routers are in `serve_app.router`, whose name deployments give to Serve.
"""
