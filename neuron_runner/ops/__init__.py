"""Operations of their own that the Neuron graphs are made of."""
