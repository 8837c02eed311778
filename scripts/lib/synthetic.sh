# shellcheck shell=bash
# The command line that the writers of synthetic checkpoints share. Sourced, never run.

# synthetic PROGRAM NUMBERED… -- WORD…: checks the words of a command line and hands them on. NUMBERED are the options that
# take a number; --small and --hollow take nothing, and one word says where to.
synthetic() {
    local program=$1 numbered=" " words=() place=
    shift
    while [[ $1 != -- ]]; do
        numbered+="$1 "
        shift
    done
    shift
    while (($#)); do
        case $1 in
            -h | --help)
                usage "$0"
                return 0
                ;;
            --small | --hollow) words+=("$1") ;;
            -*)
                [[ $numbered == *" $1 "* ]] || die_usage "unknown option '$1' (see --help)"
                [[ ${2:-} =~ ^[0-9]+$ ]] || die_usage "$1 takes a number (see --help)"
                words+=("$1" "$2")
                shift
                ;;
            *)
                [[ -z $place ]] || die_usage "one place is written to at a time (see --help)"
                place=$1
                ;;
        esac
        shift
    done
    [[ -n $place ]] || die_usage "where to? (see --help)"
    python3 "$program" "${words[@]}" "$place"
}
