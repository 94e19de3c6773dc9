#!lua flags=allow-oom
-- Requires: state pages records record_lists endings steps trained_steps
-- TAKEN -> RELEASED(trained) for the batch of a step. ARGV[2], ARGV[3]: epoch, version.
if is_fenced(ARGV[2]) then return {'fenced', meta_number('epoch')} end
mark_step_trained(ARGV[3])
return {'ok'}
