"""Recurrent layers in plain torch: convolutions, Mamba, gated delta nets, and the states that they keep."""
