# Completion for bash of Verbatim's programs: options, and the words that an option or argument allows, from --help.

# Sets `options`, and `values`: the words that may follow $previous, or else those of the first argument.
_verbatim_read_help() {  # _verbatim_read_help PROGRAM [SUBCOMMAND]
  local line names rest name
  local of_option='^([A-Z]+:[{]([^}]*)[}]|([a-z]+([|][a-z]+)+) )' of_argument='^  [a-z]+ [A-Z]+:[{]([^}]*)[}]'
  local a_value='^[A-Z]'
  while IFS= read -r line; do
    [[ ! $line =~ $of_argument || -n $previous_takes_value ]] || values=${BASH_REMATCH[1]//,/ }
    [[ $line == '  -'* ]] || continue
    read -r names rest <<<"$line"
    for name in ${names//,/ }; do
      name=${name%%'{'*}
      options+=("$name")
      [[ $name == "$previous" ]] || continue
      if [[ $rest =~ $of_option ]]; then
        previous_takes_value=yes
        values=${BASH_REMATCH[2]:-${BASH_REMATCH[3]}}
        values=${values//[,|]/ }
      elif [[ $rest =~ $a_value ]]; then
        previous_takes_value=yes
        values=
      fi
    done
  done < <("$@" --help 2>/dev/null)
}

_verbatim_complete() {
  local program=$1 current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
  local words= options=() values= previous_takes_value= subcommand=() i
  case ${program##*/} in
    verbatim-perf) words='cost qp-order' ;;
    softverbs) words='fault hold release stats' ;;
  esac
  if [ "$COMP_CWORD" -gt 1 ] && [[ " $words " == *" ${COMP_WORDS[1]} "* ]]; then subcommand=("${COMP_WORDS[1]}"); fi
  if [ "${program##*/}" = softverbs ] && [ ${#subcommand[@]} -eq 0 ]; then
    for ((i = 1; i < COMP_CWORD; i++)); do  # what follows -- is another program's
      [ "${COMP_WORDS[i]}" = -- ] || continue
      if declare -F _command_offset >/dev/null; then
        _command_offset $((i + 1))
      else
        mapfile -t COMPREPLY < <(compgen -c -- "$current")
      fi
      return
    done
  fi
  _verbatim_read_help "$program" "${subcommand[@]}"
  if [ -n "$previous_takes_value" ] && [ -z "$values" ] || [[ ${program##*/} = verbatim-report && $current != -* ]]; then
    mapfile -t COMPREPLY < <(compgen -f -- "$current")
  elif [ -n "$previous_takes_value" ]; then
    mapfile -t COMPREPLY < <(compgen -W "$values" -- "$current")
  elif [[ $current == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "${options[*]}" -- "$current")
  else
    [ "$COMP_CWORD" -ne 1 ] || values="$values $words"
    mapfile -t COMPREPLY < <(compgen -W "$values" -- "$current")
  fi
}

complete -o filenames -F _verbatim_complete softverbs softverbs-bench verbatim-{eplb,exporter,info,kv,model,perf,report,top}
