"""What Grafana's published models make of dashboards: read, and written again. What they do not know is gone then.

Executed by a Python that has them; a list of dashboards as JSON comes in, one goes out, with the error of what they
cannot read.
"""

import json
import sys

from grafana_foundation_sdk.cog.encoder import JSONEncoder  # type: ignore[import-not-found]
from grafana_foundation_sdk.cog.plugins import register_default_plugins  # type: ignore[import-not-found]
from grafana_foundation_sdk.models.dashboard import Dashboard  # type: ignore[import-not-found]

register_default_plugins()
found = []
for given in json.load(sys.stdin):
    try:
        found.append(json.loads(JSONEncoder().encode(Dashboard.from_json(given))))
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
json.dump(found, sys.stdout)
