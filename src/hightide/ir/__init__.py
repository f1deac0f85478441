"""Pure data: facts (Profile), decisions (Plan) and actions (Schedule). No tensors, no torch, no policy."""
