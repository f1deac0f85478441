"""Update rules on chunks, and the gradients that users see of parameters which are not there."""
