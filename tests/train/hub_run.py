"""Train a tiny model in the folder argv[1] and push it to the Hub that HF_ENDPOINT names."""

import sys

from override_runs import ours, pad, token_rows
from tiny_runs import tiny_bert
from transformers import BertForSequenceClassification

import engine
import whet

model = tiny_bert(BertForSequenceClassification, num_labels=3)
args = ours(sys.argv[1], save_strategy="epoch")
trainer = engine.Trainer(model, args, pad, token_rows(), token_rows(5))
trainer.train()
trainer.evaluate()
try:
    print("PUSHED", trainer.push_to_hub("a message", token="hf_token_of_the_test", tags="river"))
except whet.WhetError as error:
    print("REFUSED", error)
