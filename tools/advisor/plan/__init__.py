"""From a workload to a build: predicted latencies, a search over layouts, buckets from traffic."""
