"""From a configuration to the plan that runs: settings, facts about file and machine, and what is chosen.

Knows nothing of requests, text or HTTP.
"""
