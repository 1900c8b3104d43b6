"""The engine of whet's commands: it trains, evaluates and predicts; it knows no Trainer and no command."""
