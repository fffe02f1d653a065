"""RoBERTa-large's shape, for counting: importing `tests.launches` would register the fake device in this process."""

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LARGE |= {"vocab_size": 50265, "max_position_embeddings": 514}
ROWS = (16, 64)  # of 32 tokens: a paired forward, and a forward per sign
