"""Workers as the router sees them: facts, a typed client, the registry, and leases. Knows nothing of requests'
content.
"""
