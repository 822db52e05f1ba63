"""`banyan bench`: times of a step and of a rollout, beside the same work done by other programs."""
