"""Who owns a loaded model: sessions of a new run, of a checkpoint or of any step; restoring and replaying; the rows."""
