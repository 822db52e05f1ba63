"""The configuration files: ppo_trainer.yaml holds every honoured key, recipe/ holds small sets of overrides."""
