"""From a bare host to an endpoint: deploys, releases, the host lock."""
